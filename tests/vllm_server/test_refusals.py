"""A window that cannot be in force stops a server at its start, with one sentence of ours."""

from pathlib import Path

from servers import MTP, Server, stopped

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}


def test_an_unknown_key_and_a_drafter_without_attention(tmp_path: Path):
    misspelt = Server(tmp_path / "misspelt", {"windw": 300}, MTP)
    with stopped(misspelt):
        ngram = Server(tmp_path / "ngram", {"window": 300}, NGRAM)
        with stopped(ngram):
            for server, sentence in (
                (misspelt, "has an unknown key 'windw'; known are sink, window"),
                (ngram, "the drafter (ngram) has no attention layers to window; remove"),
            ):
                assert server.exit_code() != 0
                assert sentence in server.err.read_text()
