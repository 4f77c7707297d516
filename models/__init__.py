"""GPT-2, BERT, ViT, DINO and an encoder-decoder Transformer as plain modules, independent of any
training method."""
