import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eval.hallamonic.start import Options, bits_per_token, main, read_windows


def word(token: int) -> str:
    return chr(97 + token // 8) + chr(97 + token % 8)


@pytest.fixture
def options(tmp_path: Path) -> Options:
    torch.manual_seed(0)
    source = LlamaForCausalLM(LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2))
    source.save_pretrained(tmp_path / "source")
    words = Tokenizer(models.WordLevel({word(i): i for i in range(61)}, unk_token="aa"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="aa").save_pretrained(tmp_path / "source")
    (tmp_path / "text.txt").write_text(" ".join(word(i * i % 61) for i in range(50)))
    return Options(str(tmp_path / "source"), tmp_path / "text.txt", ("none", "1", "all"), seq_len=20, audit_length=5,
                   out=tmp_path / "out")


def test_every_cell_is_audited_and_scored_once(options: Options, capsys: pytest.CaptureFixture[str]) -> None:
    main(options)
    rows = [json.loads(line) for line in (options.out / "start.jsonl").read_text().splitlines()]
    assert [(row["layers"], row["init"]) for row in rows] == [
        ("none", "attention"), ("1", "attention"), ("1", "random"), ("all", "attention"), ("all", "random")]
    source = LlamaForCausalLM.from_pretrained(options.model)
    x = torch.tensor([[i * i % 61 for i in range(40)]]).view(2, 20)
    expected = F.cross_entropy(source(x).logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()).item() / 0.6931471805599453
    assert rows[0]["bits_per_token"] == pytest.approx(expected, rel=1e-5)
    assert all(row["random_bits_per_token"] > row["log2_vocab"] - 1 for row in rows)
    assert (options.out / "start.png").read_bytes().startswith(b"\x89PNG")

    # what is there is not run again; what is missing is
    (options.out / "start.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    capsys.readouterr()
    main(options)
    assert capsys.readouterr().out.count("bits per token") == 1
    assert [json.loads(line) for line in (options.out / "start.jsonl").read_text().splitlines()] == rows


def test_a_model_without_weights_has_the_entropy_of_the_vocabulary() -> None:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    torch.nn.init.zeros_(model.lm_head.weight)
    assert bits_per_token(model, torch.arange(20).view(2, 10)) == pytest.approx(6)


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a text of 2 x 20 tokens; got 39\. Pass a longer text, or fewer windows"):
        read_windows(list(range(39)), 2, 20)
    with pytest.raises(ValueError, match="`seq_len` at least 2; got 1 and 1"):
        read_windows(list(range(39)), 1, 1)
