"""Triton's interpreter, and tiny random models of transformers for models and drivers."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
os.environ.pop("COLUMNS", None)  # of the workers of pytest-xdist; what is printed would fit it


@pytest.fixture(scope="session")
def hf_model():
    """hf_model("llama", vocab_size=320): two layers, width 32, 32 positions, in eval mode."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        OPTConfig,
        OPTForCausalLM,
    )
    from transformers.utils import logging

    logging.disable_progress_bar()
    grouped = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
    }
    families = {
        "gpt2": lambda vocab: GPT2LMHeadModel(
            GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=32, **vocab)
        ),
        "llama": lambda vocab: LlamaForCausalLM(LlamaConfig(**grouped, **vocab)),
        "mistral": lambda vocab: MistralForCausalLM(MistralConfig(**grouped, **vocab)),
        "opt": lambda vocab: OPTForCausalLM(
            OPTConfig(
                num_hidden_layers=2,
                hidden_size=32,
                ffn_dim=64,
                num_attention_heads=2,
                word_embed_proj_dim=32,
                max_position_embeddings=32,
                **vocab,
            )
        ),
    }

    def build(family, vocab_size=320, seed=0, end_of_text=None):
        torch.manual_seed(seed)
        tokens = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
        return families[family]({"vocab_size": vocab_size, **tokens}).eval()

    return build
