"""Every published protocol runs, with a tiny local model in place of the hub's and two problems in place of all."""

import dataclasses

import pytest
from tasks.test_public_sets import AIME24, ARENA, CODE, GPQA, GSM8K, MATH500, write

import epiviz as ev
from epiviz import reproduction
from epiviz.tasks.protocols import PROTOCOLS

ROWS = {"aime24": AIME24, "math500": MATH500, "gpqa-diamond": GPQA, "livecodebench": CODE, "gsm8k": GSM8K}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random two-layer model with the word pieces of no language, as a group would download a real one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None)
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template).save_pretrained(path)
    return path


@pytest.mark.parametrize("key", PROTOCOLS, ids="/".join)
def test_every_protocol_runs_with_a_local_model_and_two_problems(key, folder, tmp_path):
    asked = reproduction.find("/".join(key))
    rows = ROWS.get(asked.task, ARENA) * (1 if len(ROWS.get(asked.task, ARENA)) > 1 else 2)
    solved = reproduction.reproduce(
        ev.load(folder),
        asked,
        ["full", "random"],
        min(asked.budgets),
        n_problems=2,
        max_new_tokens=4,
        path=write(tmp_path / "rows.jsonl", rows),
        cache=tmp_path / "texts",
        progress=False,
    )
    frame = solved.frame
    assert len(frame) == 2 * 2 * asked.samples
    assert set(frame["outcome"]) <= {"length", "loop"}, "four tokens of a random model are no answer"
    budget = reproduction.limit(asked, min(asked.budgets))
    evicting = frame[frame["policy"] == "random"]
    assert set(evicting["slots"]) == {budget.total} and set(evicting["recent"]) == {budget.recent}


def test_a_prompt_and_its_text_share_the_tokens_that_a_protocol_allows(folder, tmp_path):
    asked = dataclasses.replace(reproduction.find("vase/gsm8k"), max_tokens=400)
    path = write(tmp_path / "rows.jsonl", GSM8K)
    model = ev.load(folder)
    options = {"path": path, "n_problems": 1, "samples": 1, "cache": tmp_path / "texts", "progress": False}
    solved = reproduction.reproduce(model, asked, "full", **options)
    (problem,) = ev.tasks.load("gsm8k", 1, protocol="vase", path=path)
    assert solved.frame["tokens"].tolist() == [400 - len(model.encode(problem.prompt))]


def test_a_protocol_that_nobody_published_is_refused():
    with pytest.raises(ValueError, match="named paper/task, not 'gsm8k'; there is epikv/math500"):
        reproduction.find("gsm8k")
    with pytest.raises(ValueError, match="no published protocol of 'epikv' on 'gsm8k'"):
        reproduction.find("epikv/gsm8k")
