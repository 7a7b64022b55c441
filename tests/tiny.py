"""Tiny random models, small enough to compare with a full forward pass, and prompts for them."""

from __future__ import annotations

import functools

import torch

import epiviz as ev

VOCABULARY = 97
WINDOW = 24  # of the hybrid model's sliding layers
_CONFIGS = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "phi3": ("Phi3Config", {}),
    "smollm3": ("SmolLM3Config", {}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 40,  # not head_dim: logits on a scale of their own
        },
    ),
}


@functools.cache
def tiny_model(architecture: str = "qwen3", heads: int = 4, kv_heads: int = 2, dtype=torch.float64, layers: int = 4):
    """A small random model; its norms keep float64, where the library's would round to float32."""
    import transformers

    kind, own = _CONFIGS[architecture]
    config = getattr(transformers, kind)(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=16,
        max_position_embeddings=4096,
        initializer_range=0.3,  # far from uniform: an error in the mask shows in the logits
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **own,
    )
    torch.manual_seed(7)
    lm = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    lm = lm.to(dtype)
    for module in list(lm.modules()):
        for name, child in module.named_children():
            if hasattr(child, "variance_epsilon"):
                norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, dtype=dtype)
                norm.weight.data.copy_(child.weight.data)
                setattr(module, name, norm)
    return ev.Model(lm, None, f"tiny-{architecture}-{heads}:{kv_heads}")


@functools.cache
def byte_tokenizer():
    """A tokenizer for the tiny models: one token for each of 97 bytes, the last of which are parts of characters."""
    from epiviz.text import _byte_alphabet

    letters = {byte: letter for letter, byte in _byte_alphabet().items()}
    chosen = dict.fromkeys(
        [*b"abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,;!?0123456789\n", *range(0xA0, 0xFF)]
    )
    chosen = [*list(chosen)[: VOCABULARY - 4], *"😀".encode()]
    return byte_level([letters[byte] for byte in chosen])


def byte_level(letters, **settings):
    """A tokenizer with one token for each letter of a byte-level alphabet, in this order."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def fitting(policy):
    """A policy for the budgets of these tests, which hold no block of 64 slots, a selection's default."""
    chosen = ev.policies.get(policy)
    return chosen.with_parameters(block=8) if chosen.selects and isinstance(policy, str) else chosen


def random_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
