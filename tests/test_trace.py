"""Recording, saving and loading traces."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tiny import random_prompt, tiny_model

import epiviz as ev

QUESTION = "What is 3 + 4? Think step by step."


def reference_signals(model, ids):
    """Signals by one plain transformers pass with all hidden states, and a dynamic cache for the values."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.lm.config)
    with torch.inference_mode():
        out = model.lm(torch.tensor([ids]), cache=cache, output_hidden_states=True)
    hidden = torch.stack(out.hidden_states[1:])[:, 0].double()
    moves = torch.zeros(hidden.shape[:2])
    moves[:, 1:] = (hidden[:, 1:] - hidden[:, :-1]).norm(dim=-1)
    values = torch.stack([layer.values[0] for layer in cache.layers])
    log_p = out.logits[0].double().log_softmax(-1)
    surprisal = -log_p[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)[:-1]
    return moves, values.amax(-1) - values.amin(-1), surprisal, entropy


@pytest.mark.parametrize("how", ["generated", "tokens"])
def test_signals_equal_a_plain_pass(how):
    model, prompt = tiny_model("llama"), random_prompt(600)
    if how == "generated":
        trace = ev.record(model, prompt, max_new_tokens=40, progress=False)
        assert len(trace) == 640, "the last token has its signals too"
    else:
        trace = ev.record(model, prompt, tokens=random_prompt(300, 1), progress=False)
        assert trace.tokens.tolist() == prompt + random_prompt(300, 1)
    moves, ranges, surprisal, entropy = reference_signals(model, trace.tokens.tolist())
    # The last entry of hidden_states is after the final norm, ours are the raw residual streams.
    assert trace.displacement[:-1] == pytest.approx(moves[:-1].numpy(), rel=1e-5, abs=1e-5)
    assert trace.value_range == pytest.approx(ranges.numpy(), rel=1e-5)
    assert trace.surprisal[1:] == pytest.approx(surprisal.numpy(), rel=1e-4, abs=1e-4)
    assert trace.entropy[1:] == pytest.approx(entropy.numpy(), rel=1e-4, abs=1e-4)
    assert np.isnan(trace.surprisal[0]) and np.isnan(trace.entropy[0])
    assert trace.displacement.dtype == trace.value_range.dtype == np.float32
    assert trace.header["source"] == how and trace.prompt_length == 600


def test_the_epikv_policy_sees_the_scores_of_the_trace():
    """One implementation: a cache that never overflows freezes the scores that signals.epiphany gives."""
    from epiviz import engine, policies

    model, prompt = tiny_model("qwen3"), random_prompt(30)
    trace = ev.record(model, prompt, max_new_tokens=50, progress=False)
    policy, budget = policies.get("epikv"), ev.Budget(200)
    rows = engine.make_rows([prompt], policy, budget, 50)
    with engine.Session(model, policy, rows, 50, 0) as session:
        session.prefill()
        for token in trace.tokens[30:79]:
            session.feed(torch.tensor([[int(token)]]))
        score = session.cache.tracks["score"][0, 0, 0, :79].numpy()
    assert score == pytest.approx(ev.signals.epiphany(trace)[:79], abs=1e-4)


def test_recording_with_the_bundled_model(smollm2, tmp_path):
    trace = ev.record(smollm2, QUESTION, max_new_tokens=24, progress=False)
    assert trace.continuation and trace.text.startswith("<|im_start|>")
    assert "".join(trace.spans.pieces) == trace.text
    assert trace.displacement.shape == (30, len(trace)) and trace.value_range.shape == (30, 3, len(trace))
    path = trace.save(tmp_path / "folder" / "t.safetensors")
    again = ev.Trace.load(path)
    for name in ("tokens", "displacement", "value_range", "surprisal", "entropy"):
        assert np.array_equal(getattr(again, name), getattr(trace, name), equal_nan=True)
    assert (again.text, again.header, again.name) == (trace.text, trace.header, trace.name)
    assert np.array_equal(again.spans.utf16_offsets, trace.spans.utf16_offsets)
    again.check_model(smollm2)
    assert [file.name for file in path.parent.iterdir()] == ["t.safetensors"], "nothing temporary is left"


def test_reading_a_text_in_chinese_with_emoji(smollm2):
    text = "首先，我们把 12 加上 7 🙂，得到 19。"
    trace = ev.record(smollm2, QUESTION, text=text, progress=False)
    assert trace.continuation == text and trace.header["source"] == "text"


def test_loading_needs_no_model(smollm2, tmp_path):
    path = ev.record(smollm2, QUESTION, text="Seven.", progress=False).save(tmp_path / "t.safetensors")
    code = f"import epiviz as ev, sys; t = ev.Trace.load({str(path)!r}); print(len(ev.signals.epiphany(t)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"HF_HUB_OFFLINE": "1", "PATH": "", "EPIVIZ_CACHE": "/nowhere"},
    )
    assert done.returncode == 0, done.stderr


def test_ctrl_c_returns_the_part_recorded(monkeypatch):
    model = tiny_model("llama")
    hooks = [len(layer._forward_hooks) for layer in model.decoder_layers]  # the library keeps hooks of its own
    forward, count = type(model).forward, iter(range(100))

    def spy(self, *args, **kwargs):
        if next(count) == 10:
            signal.raise_signal(signal.SIGINT)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", spy)
    trace = ev.record(model, random_prompt(20), max_new_tokens=50, progress=False)
    assert trace.status == "stopped" and len(trace) == 20 + 9
    assert [len(layer._forward_hooks) for layer in model.decoder_layers] == hooks


@pytest.fixture
def saved(synthetic_trace, tmp_path):
    return synthetic_trace.save(tmp_path / "t.safetensors")


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no trace file .*none.safetensors; record one:"):
        ev.Trace.load(tmp_path / "none.safetensors")


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.999])
def test_truncated_file(saved, share):
    data = saved.read_bytes()
    saved.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ev.TraceFileError, match=r"cut off, damaged or no trace"):
        ev.Trace.load(saved)


def test_foreign_files(saved, tmp_path):
    other = tmp_path / "weights.safetensors"
    save_file({"x": np.zeros(3)}, str(other))
    with pytest.raises(ev.TraceFileError, match="no trace: it has no epiviz header"):
        ev.Trace.load(other)
    save_file({"x": np.zeros(3)}, str(other), metadata={"epiviz": "{}"})
    with pytest.raises(ev.TraceFileError, match="lacks displacement, entropy"):
        ev.Trace.load(other)
    other.write_text("<html>not found</html>")
    with pytest.raises(ev.TraceFileError, match="cut off, damaged or no trace"):
        ev.Trace.load(other)


def test_a_trace_of_another_model(saved, smollm2):
    with pytest.raises(
        ev.ForeignTraceError, match="recorded with 'made-up' .tokenizer none., the model 'smollm2-135m'"
    ):
        ev.Trace.load(saved).check_model(smollm2)


def test_nothing_to_record(smollm2):
    for arguments in (
        {"prompt": ""},
        {"prompt": []},
        {"prompt": QUESTION, "text": ""},
        {"prompt": QUESTION, "tokens": []},
    ):
        with pytest.raises(ValueError, match="empty"):
            ev.record(smollm2, **arguments)
    with pytest.raises(ValueError, match="not both"):
        ev.record(smollm2, QUESTION, text="a", tokens=[1])


def test_a_single_token_is_a_trace():
    trace = ev.record(tiny_model("llama"), tokens=[5], progress=False)
    assert len(trace) == 1 and trace.displacement.shape == (4, 1)
    assert ev.signals.epiphany(trace).tolist() == [0.0]


def test_repr_names_the_essentials(synthetic_trace):
    assert "20 prompt + 100 tokens, 5 layers × 2 KV heads" in repr(synthetic_trace)
    assert replace(synthetic_trace, header={}).status == "finished"
