"""GPT-2, BERT, ViT, DINO and an encoder-decoder as plain modules; none knows a training method."""
