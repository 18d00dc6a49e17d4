"""The hot vocabulary: sets of an exact size, files that belong to one tokenizer, and counts in bounded memory."""

import copy
import io
import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from windowed_mtp.errors import VocabularyError
from windowed_mtp.reference import checkpoint_path
from windowed_mtp.vocab import HotSet, HotVocabulary, OnlineCounts, TokenizerIdentity, hot_ids, left_out
from windowed_mtp.vocab.count import count_tokens, pieces
from windowed_mtp.vocab.file import byte_ids


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(checkpoint_path())


@pytest.fixture(scope="module")
def vocabulary() -> HotVocabulary:
    made = HotVocabulary.from_counts({9: 5, 4: 7, 2000: 5, 30: 0, 6: 1}, tokenizer=tokenizer())
    return made.model_copy(update={"byte_tokens": ()})


@given(st.data())
def test_the_size_is_exact_and_the_order_of_claims_is_kept(data: st.DataObject):
    vocab_size = data.draw(st.integers(1, 40))
    some = st.lists(st.integers(0, vocab_size - 1), unique=True, max_size=12)
    ranked, always = data.draw(some), data.draw(some)
    size = data.draw(st.integers(max(1, len(always)), vocab_size))
    hot = hot_ids(size, vocab_size, ranked, always=always + always)
    assert hot == sorted(set(hot)) and len(hot) == size
    claims = list(dict.fromkeys([*always, *ranked, *range(vocab_size)]))
    assert set(hot) == set(claims[:size])
    assert hot_ids(vocab_size, vocab_size, ranked, always=always) == list(range(vocab_size))


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (0, {}, "is 0, but it must be from 1 to the model's 8 tokens"),
        (9, {}, "is 9, but"),
        (2.5, {}, "must be a whole number"),
        (4, {"ranked": [-8]}, "has token -8, but ids begin with 0"),
        (4, {"always": [-2]}, "has token -2"),
        (2, {"always": [1, 2, 3]}, "of 2 cannot hold the 3 tokens"),
    ],
)
def test_bad_sizes_and_ids(size: Any, options: dict[str, Any], message: str):
    with pytest.raises(VocabularyError, match=message) as error:
        hot_ids(size, 8, **options)
    assert isinstance(error.value, ValueError)


def test_ranking_by_counts(vocabulary: HotVocabulary):
    assert vocabulary.ranked == (4, 9, 2000, 6) and vocabulary.counts == (7, 5, 5, 1)
    assert vocabulary.special == (0,)
    assert vocabulary.ids(3, 2048) == [0, 4, 9]
    assert vocabulary.ids(4, 2048, always=[77]) == [0, 4, 9, 77]
    assert vocabulary.ids(7, 2048) == [0, 1, 2, 4, 6, 9, 2000]
    assert vocabulary.ids(2100, 2100) == list(range(2100)), "an output head may have more rows than the tokenizer ids"
    assert vocabulary.coverage(3) == 12 / 18 and vocabulary.coverage(2048) == 1


def byte_level() -> Any:
    """A tokenizer of bytes and of one pair of them."""
    letters = ByteLevel.alphabet()
    vocabulary = {"<end>": 0, **{letter: n for n, letter in enumerate(sorted(letters), 1)}, "Ġa": 257}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("Ġ", "a")]))
    model.pre_tokenizer, model.decoder = ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")


def falling_back() -> Any:
    """A tokenizer of words and letters that falls back to bytes; its letters are some that others take for bytes."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {"<end>": 0, **{letter: n for n, letter in enumerate(ByteLevel.alphabet(), 1)}}
    vocabulary |= {name: len(vocabulary) + n for n, name in enumerate(names)}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True, unk_token="<end>"))
    model.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")


def of_words() -> Any:
    """A tokenizer of words, some of them letters that others take for bytes: it has no bytes."""
    words = {"<end>": 0, "word": 1, **{letter: n for n, letter in enumerate(ByteLevel.alphabet(), 2)}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<end>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")


@pytest.mark.parametrize("made", [byte_level, falling_back, tokenizer])
def test_any_text_can_be_written_with_the_hot_tokens(made: Any):
    """Each text's bytes have a hot token each, whatever was counted, on a file and online, and in an older file."""
    known = made()
    bytes_ = byte_ids(known)
    assert len(bytes_) == 256
    text = "Ünïcode: \U0001f600\t\x00\n ÿ"
    spelled = [known.convert_tokens_to_ids(name) for name in _names(known, text.encode())]
    assert known.decode(spelled) == text and set(spelled) <= set(bytes_)
    file = HotVocabulary.from_counts({}, tokenizer=known)
    size, vocab_size = len(file.always), file.tokenizer.size
    assert size == len({*file.special, *bytes_}) and set(bytes_) <= set(file.ids(size, vocab_size))
    online = OnlineCounts(file, interval=1)
    online.update([size] * 9)
    assert set(bytes_) <= set(online.ids(size, vocab_size))
    older = HotVocabulary.model_validate(file.model_dump(exclude={"byte_tokens"}))
    assert not older.byte_tokens and older.completed(known) == file == file.completed(known)
    with pytest.raises(VocabularyError, match="was made with the tokenizer of"):
        file.completed(of_words())


def _names(known: Any, text: bytes) -> list[str]:
    if "<0x00>" in known.get_vocab():
        return [f"<0x{byte:02X}>" for byte in text]
    letters = ByteLevel(add_prefix_space=False, use_regex=False)
    return [each for each in "".join(name for name, _ in letters.pre_tokenize_str(text.decode()))]


def test_a_tokenizer_without_bytes_has_none():
    assert byte_ids(of_words()) == []
    assert HotVocabulary.from_counts({}, tokenizer=of_words()).always == {0}


def test_a_size_below_what_is_always_in_is_one_sentence():
    file = HotVocabulary.from_counts({300: 5}, tokenizer=tokenizer())
    with pytest.raises(VocabularyError, match="of 256 cannot hold the 257 tokens that are always in it") as caught:
        file.ids(256, 2048)
    with pytest.raises(VocabularyError, match="of 300 cannot hold 257 special and single-byte tokens and 44 of the"):
        HotSet(file, 300, prompt_tail=44)
    assert "\n" not in str(caught.value)
    assert 300 in HotSet(file, 258).ids(2048)


def test_a_file_comes_back_as_it_was(vocabulary: HotVocabulary, tmp_path: Path):
    vocabulary.save(tmp_path / "hot.json")
    assert HotVocabulary.load(tmp_path / "hot.json") == vocabulary
    assert [path.name for path in tmp_path.iterdir()] == ["hot.json"]


def test_a_failed_save_leaves_the_old_file(vocabulary: HotVocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    vocabulary.save(tmp_path / "hot.json")
    before = (tmp_path / "hot.json").read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(VocabularyError, match="No space left"):
        vocabulary.save(tmp_path / "hot.json")
    assert (tmp_path / "hot.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["hot.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranked": [4, 4, 2000, 6]}, "ranked has a token twice"),
        ({"ranked": [4, 9, 2048, 6]}, "ranked has a token outside of the tokenizer's 2048"),
        ({"ranked": [4, -9, 2000, 6]}, "ranked has a token outside"),
        ({"special": [2048]}, "special has a token outside"),
        ({"byte_tokens": [2048]}, "byte_tokens has a token outside"),
        ({"counts": [7]}, "4 ranked tokens, but 1 counts"),
        ({"counts": [7, 5, 6, 1]}, "must not grow"),
        ({"schema_version": 2}, "schema_version"),
        ({"surprise": 1}, "surprise"),
        (None, "Invalid JSON"),
    ],
)
def test_bad_files(vocabulary: HotVocabulary, tmp_path: Path, change: dict[str, Any] | None, message: str):
    path = tmp_path / "hot.json"
    path.write_text("no" if change is None else json.dumps({**json.loads(vocabulary.model_dump_json()), **change}))
    with pytest.raises(VocabularyError, match=message):
        HotVocabulary.load(path)


def test_bad_counts():
    for counts in ({2048: 1}, {-1: 1}, {3: -1}):
        with pytest.raises(VocabularyError, match="the counts make no hot vocabulary"):
            HotVocabulary.from_counts(counts, tokenizer=tokenizer())


def _saved(content: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        _saved([700, 4, 300, 4, 2100]),
        _saved(torch.tensor([700, 4, 300, 2100])),
        _saved(torch.tensor([[700], [4], [300], [2100]], dtype=torch.int32)),
        _saved([700, 4, 300, 2100], _use_new_zipfile_serialization=False),
        b" [700, 4, 300, 4, 2100]\n",
    ],
    ids=["list", "tensor", "column", "old torch", "json"],
)
def test_token_maps_of_other_engines(tmp_path: Path, content: bytes):
    (tmp_path / "map").write_bytes(content)
    made = HotVocabulary.load(tmp_path / "map")
    assert made.ranked == (700, 4, 300, 2100) and made.is_token_map and not made.always
    assert made.ids(3, 2048) == [4, 300, 700] and made.beyond(2048) == 1
    made.check_tokenizer(tokenizer())
    whole = made.completed(tokenizer())
    assert not whole.is_token_map and whole.special == (0,) and len(whole.always) == 257
    assert set(whole.ids(259, 2048)) == {*whole.always, 300, 700}
    larger = tokenizer()
    larger.add_tokens(["<one more>"])
    with pytest.raises(VocabularyError, match="was made with the tokenizer of"):
        whole.check_tokenizer(larger)


class Unsafe:
    """What would run something as it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a file's code was run",)


@pytest.mark.parametrize(
    "content",
    [
        _saved({"ids": [1, 2]}),
        _saved([1, 2.5]),
        _saved(torch.tensor([1.0, 2.0])),
        _saved([1, -2]),
        _saved([]),
        _saved(Unsafe()),
        _saved([1, 2])[:40],
        b"\x80\x02never a pickle",
        b"[1, 2",
        b"[]",
        b"[[1], [2]]",
        b"[true, false]",
        b"[" * 200_000,
        _saved(torch.eye(3, dtype=torch.int64).to_sparse()),
        _saved(torch.empty(3, dtype=torch.int64, device="meta")),
    ],
    ids=[
        "dict",
        "float",
        "tensor",
        "negative",
        "empty",
        "code",
        "cut",
        "pickle",
        "json",
        "none",
        "nested",
        "bool",
        "deep",
        "sparse",
        "meta",
    ],
)
def test_malformed_token_maps_are_one_sentence(tmp_path: Path, content: bytes):
    (tmp_path / "map.pt").write_bytes(content)
    with pytest.raises(VocabularyError, match=r"map.pt' is no token map: it must be a list or tensor") as caught:
        HotVocabulary.load(tmp_path / "map.pt")
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(VocabularyError, match="No such file"):
        HotVocabulary.load(tmp_path / "hot.json")
    (tmp_path / "hot.json").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(VocabularyError, match="not text"):
        HotVocabulary.load(tmp_path / "hot.json")


def test_another_tokenizer_is_refused(vocabulary: HotVocabulary):
    vocabulary.check_tokenizer(tokenizer())
    renamed = tokenizer()
    renamed.name_or_path = "elsewhere"
    vocabulary.check_tokenizer(renamed)
    vocabulary.check_tokenizer(TokenizerIdentity.of(renamed))
    larger, special = tokenizer(), tokenizer()
    larger.add_tokens(["<one more>"])
    special.add_special_tokens({"eos_token": special.convert_ids_to_tokens(5)})
    for other in (larger, special):
        with pytest.raises(VocabularyError, match="was made with the tokenizer of"):
            vocabulary.check_tokenizer(other)


def test_texts_are_counted_in_pieces():
    text = "import os\n" * 7 + "x" * 50 + "\nend"
    assert "".join(pieces(io.StringIO(text), 16)) == text
    assert all(piece.endswith("\n") for piece in pieces(io.StringIO("ab\n" * 40), 16))
    assert max(map(len, pieces(io.StringIO(text), 16))) <= 32
    ids = tokenizer()(text, add_special_tokens=False).input_ids
    assert count_tokens(tokenizer(), [text]) == Counter(ids)


def test_online_counts_refresh_by_the_number_of_tokens():
    counts = OnlineCounts(always=[1], interval=4)
    assert counts.ids(3, 10) == [0, 1, 2] and counts.version == 0
    assert not counts.update([7, 7, 5])
    assert counts.ids(3, 10) == [0, 1, 2], "nothing changes between refreshes"
    assert counts.update([9]) and counts.version == 1
    assert counts.ids(3, 10) == [1, 5, 7]
    assert counts.update([8] * 8) and counts.version == 3
    assert counts.ids(2, 10) == [1, 8]


def test_online_counts_are_the_same_however_they_come(vocabulary: HotVocabulary):
    stream = [n * n % 37 for n in range(500)]
    at_once, singly = OnlineCounts(vocabulary, interval=64), OnlineCounts(vocabulary, interval=64)
    at_once.update(stream)
    for token in stream:
        singly.update([token])
    assert at_once.version == singly.version == 7
    assert all(at_once.ids(size, 2048) == singly.ids(size, 2048) for size in range(1, 60))


def test_online_counts_fall_back_on_the_base(vocabulary: HotVocabulary):
    counts = OnlineCounts(vocabulary, interval=2)
    assert counts.ids(3, 2048) == vocabulary.ids(3, 2048)
    counts.update([70, 70])
    assert counts.ids(3, 2048) == [0, 4, 70]


def test_online_counts_are_bounded_and_forget():
    counts = OnlineCounts(interval=8, capacity=5)
    for token in range(1000):
        counts.update([token])
        assert len(counts) <= 5 + 8
    old = OnlineCounts(interval=8, decay=0.5)
    old.update([3] * 16 + [4] * 16)
    assert old.ids(1, 10) == [4], "as many, but more recent"
    kept = OnlineCounts(interval=8, decay=1.0)
    kept.update([3] * 24 + [4] * 16)
    assert kept.ids(1, 10) == [3]


@pytest.mark.parametrize("options", [{"interval": 0}, {"capacity": 0}, {"interval": 1.5}, {"decay": 0}, {"decay": 1.1}])
def test_bad_options_of_online_counts(options: dict[str, Any]):
    with pytest.raises(VocabularyError, match=f"{next(iter(options))} is"):
        OnlineCounts(**options)


def test_bad_emitted_ids():
    with pytest.raises(VocabularyError, match="token -1"):
        OnlineCounts().update([3, -1])
    counts = OnlineCounts(interval=1)
    counts.update([12, 9])
    assert counts.ids(2, 10) == [0, 9], "12 is left out"


def test_ids_beyond_the_output_heads_rows_are_left_out(vocabulary: HotVocabulary):
    assert hot_ids(4, 8, [20, 7, 8], always=[9, 2, 8, 3]) == [0, 2, 3, 7]
    assert hot_ids(8, 8, [20], always=[9]) == list(range(8))
    assert vocabulary.ids(3, 1000) == [0, 4, 9] and vocabulary.ids(5, 1000) == [0, 1, 4, 6, 9]
    online = OnlineCounts(vocabulary, always=[1500], interval=1)
    online.update([1700])
    assert online.ids(3, 1000) == [0, 4, 9]
    for ranking, beyond in ((vocabulary, 1), (online, 2)):
        assert ranking.beyond(1000) == beyond and ranking.beyond(2001) == 0
        assert left_out(ranking, 2001) is None
        text = left_out(ranking, 1000)
        assert text is not None and f"from 1000 on are left out of the hot vocabulary ({beyond} of them)" in text


def test_a_ranking_that_learns_can_be_copied_and_kept():
    made = OnlineCounts(interval=2)
    made.update([7, 7, 9])
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other.version == 1 and other.ids(3, 20) == made.ids(3, 20)
        other.update([3, 3, 3, 3, 3])
        assert other.version > made.version == 1
