"""Conversations to documents: what is trained under all kinds of templates, and what is cut, skipped, refused."""

import json
import logging
import random
from itertools import groupby
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from hf_wlb.data import WLBDataCollator
from hf_wlb.data.chat import CHATML_TEMPLATE, add_chat_format, load_chats, tokenize_chats
from hf_wlb.data.stdlib_chats import standard_library_chats
from hf_wlb.data.tokenization import train_byte_level_bpe

CHATML_WITHOUT_BLOCKS = CHATML_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
#: The header is part of the user's turn, and add_generation_prompt changes nothing.
INSTRUCTIONS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant roles') }}{% endif %}{% endfor %}"
)
#: Reasoning stays with the last answer only.
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>{{ m['thoughts'] }}</think>\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def built_in() -> list[Any]:
    return standard_library_chats()


def byte_tokenizer(template: str | None = CHATML_TEMPLATE) -> PreTrainedTokenizerFast:
    """A token a byte, and the two of ChatML."""
    tokenizer = add_chat_format(train_byte_level_bpe(["a"], 258))
    tokenizer.chat_template = template
    return tokenizer


def chat(*contents: str, system: str | None = None, **more: Any) -> list[dict[str, Any]]:
    """User and assistant in turn."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text, **more} for i, text in enumerate(contents)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def rows(**columns: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict(columns)


def trained(document: Any, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The trained passages; labels are the tokens themselves."""
    assert len(document["input_ids"]) == len(document["labels"]) == document["length"]
    pairs = list(zip(document["input_ids"], document["labels"], strict=True))
    assert all(label in (-100, token) for token, label in pairs)
    runs = groupby(pairs, key=lambda pair: pair[1] != -100)
    return [tokenizer.decode([token for token, _ in run]) for own, run in runs if own]


def one(messages: Any, tokenizer: PreTrainedTokenizerFast, **options: Any) -> list[str]:
    return trained(tokenize_chats(rows(messages=[messages]), tokenizer, **options).documents[0], tokenizer)


# ---- what is trained ----


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, CHATML_WITHOUT_BLOCKS], ids=["blocks", "prefixes"])
def test_answers_and_their_end_of_turn_are_trained(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    messages = chat("Hi", "Hello", "Bye", "\n See  you\n", system="Be kind")
    document = tokenize_chats(rows(messages=[messages]), tokenizer).documents[0]
    assert tokenizer.decode(document["input_ids"]) == (
        "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n\n See  you\n<|im_end|>\n"
    )
    assert trained(document, tokenizer) == ["Hello<|im_end|>", "\n See  you\n<|im_end|>"]
    assert one(messages, tokenizer, answers="last") == ["\n See  you\n<|im_end|>"]


def test_both_ways_agree_on_the_built_in_conversations(built_in: list[Any]) -> None:
    chats = random.Random(0).sample(built_in, 60)
    tokenizer = add_chat_format(train_byte_level_bpe([m["content"] for c in chats for m in c], 600))
    by_blocks = tokenize_chats(rows(messages=chats), tokenizer)
    tokenizer.chat_template = CHATML_WITHOUT_BLOCKS
    by_prefixes = tokenize_chats(rows(messages=chats), tokenizer)
    assert by_blocks.documents.to_dict() == by_prefixes.documents.to_dict()
    assert by_blocks.counts == by_prefixes.counts
    for messages, document in zip(chats, by_blocks.documents, strict=True):
        answers = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
        assert trained(document, tokenizer) == answers
    tokenizer.chat_template = CHATML_WITHOUT_BLOCKS.replace("'<|im_start|>assistant\\n'", "''")  # control
    with pytest.raises(ValueError, match="ignores add_generation_prompt"):
        tokenize_chats(rows(messages=chats), tokenizer)


def test_a_header_within_the_users_turn() -> None:
    tokenizer = byte_tokenizer(INSTRUCTIONS)
    assert one(chat("a", "b", "c", "d"), tokenizer) == [" b<|im_end|>", " d<|im_end|>"]
    with pytest.raises(ValueError, match="Row 0: the chat template refuses this conversation: only user and"):
        one(chat("a", "b", system="s"), tokenizer)


def test_an_end_of_turn_outside_the_block_is_trained_too() -> None:
    outside = CHATML_TEMPLATE.replace(
        "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}",
        "{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
    )
    assert outside != CHATML_TEMPLATE
    assert one(chat("a", "b", "c", "d"), byte_tokenizer(outside)) == ["b<|im_end|>", "d<|im_end|>"]
    # ... but not what begins the next turn, where the block has its own end
    touching = CHATML_TEMPLATE.replace("{{ '\\n' }}{% endfor %}", "{% endfor %}")
    assert one(chat("a", "b", "c", "d"), byte_tokenizer(touching)) == ["b<|im_end|>", "d<|im_end|>"]


def test_a_template_without_special_tokens_trains_its_white_space() -> None:
    plain = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert one(chat("a", "b"), byte_tokenizer(plain)) == ["b\n\n"]  # which ends the turn


def test_a_template_that_drops_earlier_reasoning() -> None:
    tokenizer = byte_tokenizer(REASONING)
    messages = chat("a", "b", "c", "d", thoughts="hm")
    with pytest.raises(ValueError, match=r"Row 0: this chat template renders .* message 1 .*Use answers='last'"):
        one(messages, tokenizer)
    assert one(messages, tokenizer, answers="last") == ["<think>hm</think>\nd<|im_end|>"]


def test_prompt_and_completion() -> None:
    tokenizer = byte_tokenizer()
    messages = rows(prompt=[chat("a", "b", "c")], completion=[[{"role": "assistant", "content": "d"}]])
    for template in (CHATML_TEMPLATE, CHATML_WITHOUT_BLOCKS):
        tokenizer.chat_template = template
        assert trained(tokenize_chats(messages, tokenizer).documents[0], tokenizer) == ["d<|im_end|>"]
    tokenizer.chat_template = None
    text = tokenize_chats(rows(prompt=["2 + 2 ="], completion=[" 4"]), tokenizer).documents[0]
    assert trained(text, tokenizer) == [" 4<|im_end|>"]
    assert tokenizer.decode(text["input_ids"]) == "2 + 2 = 4<|im_end|>"
    both = rows(messages=[chat("a", "b")], prompt=["never read"], prompt_id=["x"])
    tokenizer.chat_template = CHATML_TEMPLATE
    assert trained(tokenize_chats(both, tokenizer).documents[0], tokenizer) == ["b<|im_end|>"]


def test_what_the_tokenizer_adds_to_text_is_kept() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer(None)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>")}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=list(ids.items())
    )
    document = tokenize_chats(rows(prompt=["a"], completion=["b"]), tokenizer).documents[0]
    assert tokenizer.decode(document["input_ids"]) == "<|im_start|>ab<|im_end|>"
    assert trained(document, tokenizer) == ["b<|im_end|>"]


def test_tools_reach_the_template() -> None:
    tokenizer = byte_tokenizer("{% if tools %}{{ tools[0]['name'] }}|{% endif %}" + CHATML_WITHOUT_BLOCKS)
    for tools in ([{"name": "search"}], json.dumps([{"name": "search"}])):
        document = tokenize_chats(rows(messages=[chat("a", "b")], tools=[tools]), tokenizer).documents[0]
        assert tokenizer.decode(document["input_ids"]).startswith("search|<|im_start|>user")
        assert trained(document, tokenizer) == ["b<|im_end|>"]


def test_the_collator_takes_the_labels() -> None:
    tokenizer = byte_tokenizer(None)
    documents = tokenize_chats(rows(prompt=["a", ""], completion=["b", "cd"]), tokenizer).documents
    end = tokenizer.eos_token_id
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in "abcd"]
    micro_batch = WLBDataCollator()(list(documents.select_columns(["input_ids", "labels"])))
    assert micro_batch["input_ids"].tolist() == [[ids[0], ids[1], end, ids[2], ids[3], end]]
    assert micro_batch["labels"].tolist() == [[-100, ids[1], end, -100, ids[3], end]]


# ---- what is cut, skipped and counted ----


def test_long_conversations_are_cut_skipped_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_tokenizer()
    given = rows(messages=[chat("a", "b"), chat("a", "b" * 50), chat("a" * 50, "b")])
    short = tokenize_chats(given.select([0]), tokenizer).documents[0]["length"]
    with pytest.raises(ValueError, match="2 of 3 conversations have more than max_tokens=40; the first is row 1, 72"):
        tokenize_chats(given, tokenizer, max_tokens=40)
    with pytest.raises(ValueError, match=r"1 of 3 conversations have nothing to train.*the first is row 2"):
        tokenize_chats(given, tokenizer, max_tokens=40, oversize="truncate")
    with caplog.at_level(logging.WARNING):
        documents, counts = tokenize_chats(given, tokenizer, max_tokens=40, oversize="truncate", unanswered="skip")
    assert documents["length"][:] == [short, 40]
    assert (counts.truncated, counts.too_long, counts.unanswered, counts.documents) == (1, 0, 1, 2)
    assert counts.tokens == short + 40
    assert counts.trained_tokens == sum(label != -100 for row in documents for label in row["labels"])
    assert "2 of 3 conversations" in caplog.text and "1 cut, 1 without an answer" in caplog.text
    documents, counts = tokenize_chats(given, tokenizer, max_tokens=40, oversize="skip")
    assert documents["length"][:] == [short] and counts.too_long == 2
    with pytest.raises(ValueError, match="No conversation is left"):
        tokenize_chats(given, tokenizer, max_tokens=2, oversize="skip")


def test_conversations_without_an_answer() -> None:
    tokenizer = byte_tokenizer()
    given = rows(messages=[chat("a", "b"), chat("only a question")])
    with pytest.raises(ValueError, match=r"1 of 2 conversations have nothing to train.*unanswered='skip'"):
        tokenize_chats(given, tokenizer)
    documents, counts = tokenize_chats(given, tokenizer, unanswered="skip")
    assert len(documents) == counts.documents == 1 and counts.unanswered == 1


def test_several_workers_give_the_same_and_the_same_errors() -> None:
    tokenizer = byte_tokenizer(CHATML_WITHOUT_BLOCKS)
    given = rows(messages=[chat("a" * i, "b" * i) for i in range(1, 9)])
    alone, together = (tokenize_chats(given, tokenizer, num_proc=n) for n in (None, 2))
    assert alone.documents.to_dict() == together.documents.to_dict() and alone.counts == together.counts
    with pytest.raises(ValueError, match="Row 8 begins with the assistant"):
        broken = [*given["messages"], [{"role": "assistant", "content": "x"}]]
        tokenize_chats(rows(messages=broken), tokenizer, num_proc=2)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"text": ["a"]}, "neither a column 'messages' nor prompt and completion"),
        ({"prompt": ["a"]}, "neither a column 'messages' nor prompt and completion"),
        ({"messages": ["a"]}, "Row 0: messages is a str, not a list"),
        ({"messages": [[{"from": "human", "value": "x"}]]}, "Row 0: messages: message 0 is"),
        ({"messages": [[{"role": "assistant", "content": None}]]}, "message 0, of the assistant, has no content"),
        ({"prompt": ["a"], "completion": [chat("a", "b")]}, "must be of one kind"),
        ({"messages": []}, "The dataset is empty"),
    ],
)
def test_malformed_rows(columns: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        tokenize_chats(rows(**columns), byte_tokenizer())


def test_wrong_options_and_tokenizers() -> None:
    given = rows(messages=[chat("a", "b")])
    for options, sentence in (
        ({"answers": "first"}, "answers must be one of all, last"),
        ({"oversize": "split"}, "oversize must be one of error, truncate, skip"),
        ({"unanswered": "keep"}, "unanswered must be one of error, skip"),
        ({"max_tokens": 1}, "max_tokens must be at least 2"),
    ):
        with pytest.raises(ValueError, match=sentence):
            tokenize_chats(given, byte_tokenizer(), **options)
    with pytest.raises(ValueError, match="has no chat template"):
        tokenize_chats(given, byte_tokenizer(None))
    with pytest.raises(ValueError, match="has a chat template already"):
        add_chat_format(byte_tokenizer())
    joined = byte_tokenizer("{% generation %}{% for m in messages %}{{ m['content'] }}{% endfor %}{% endgeneration %}")
    with pytest.raises(ValueError, match="marks 1 passages as generated, but the assistant has 2 messages"):
        one(chat("a", "b", "c", "d"), joined, answers="last")


# ---- where conversations come from ----


def test_files(tmp_path: Path) -> None:
    lines = [{"messages": chat("a", "b"), "source": "x"}, {"messages": chat("c", "d"), "source": "y"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    datasets.Dataset.from_list(lines).to_parquet(tmp_path / "b.parquet")
    for name in ("a.jsonl", "b.parquet"):
        found = load_chats(tmp_path / name)
        assert found.column_names == ["messages"] and found["messages"][1] == chat("c", "d")
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match=r"c\.jsonl has neither a column 'messages'"):
        load_chats(tmp_path / "c.jsonl")
    with pytest.raises(FileNotFoundError, match="There is no file or folder"):
        load_chats(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match="only the split 'train'"):
        load_chats(None, split="test")


def test_the_built_in_conversations_vary(built_in: list[Any]) -> None:
    chats = built_in
    assert len(chats) > 1000
    assert {m["role"] for c in chats for m in c} == {"system", "user", "assistant"}
    assert all(c[-1]["role"] == "assistant" and m["content"] for c in chats for m in c)
    turns = {len([m for m in c if m["role"] == "assistant"]) for c in chats}
    assert {1, 2, 3, 6} <= turns
    sizes = sorted(sum(len(m["content"]) for m in c) for c in chats)
    assert sizes[-1] > 50 * sizes[len(sizes) // 2]
