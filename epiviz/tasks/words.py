"""A tokenizer with one token per word, for models trained on a task of their own."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
# A prompt is one user message; the model's own words start after <think>.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %} {{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} <think>{% endif %}"
)


def word_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer that reads ``words``, separated by white space, as one token each.

    Decoding joins the words with single spaces, which is how a task writes them.

    Parameters
    ----------
    words : list of str
        The vocabulary without the special tokens; its order gives the ids.
    """
    ids = {word: index for index, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", ids["<bos>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{f"{name.strip('<>')}_token": name for name in SPECIAL},
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
