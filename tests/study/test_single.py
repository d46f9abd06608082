"""``qed train``: prepared shards to a checkpoint, from a preset."""

import json

import pytest

from qed.cli import main
from qed.config import from_dict, to_dict
from qed.data.corpus import needle_texts
from qed.data.prose import load_prose
from qed.data.tokenizer import TokenizerConfig, train_tokenizer
from qed.study.single import SingleConfig, get_single


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    texts = [*load_prose()[:40], *needle_texts(40, seed=0)]
    train_tokenizer(texts, TokenizerConfig(vocab_size=1500)).save_pretrained(folder / "tokenizer")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source, out = str(folder / "text.jsonl"), str(folder / "shards")
    tokenizer = str(folder / "tokenizer")
    assert main(["data", "prepare", "--source", source, "--tokenizer", tokenizer, "--out", out]) == 0
    return out


def test_paper_preset_is_the_papers_recipe():
    config = get_single("paper-340m", "qed-rand", 1)
    assert from_dict(SingleConfig, json.loads(json.dumps(to_dict(config)))) == config
    train = config.train
    assert (train.num_tokens, train.batch_tokens, train.sequence_length) == (15_000_000_000, 524_288, 2048)
    assert (train.learning_rate, train.theta_lr_multiplier, train.decay_start_tokens) == (3e-4, 10.0, 13_500_000_000)
    assert train.num_steps == 28_611
    assert train.seed == 1


def test_train_checks_then_trains_then_is_done(shards, tmp_path, capsys):
    out = tmp_path / "run"
    command = ["train", "--preset", "tiny", "--data", shards, "--out", str(out)]
    command += ["--set", "train.decay_start_tokens=null", "train.num_tokens=8192"]
    assert main([*command, "--dry-run"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["num_steps"] == 8
    assert not out.exists()
    assert main(command) == 0
    weights = (out / "checkpoint" / "model.safetensors").read_bytes()
    assert main(command) == 0
    assert (out / "checkpoint" / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize(
    ("arguments", "wanted"), [(["--preset", "paper340"], "'paper-340m'"), (["--arm", "gdn"], "'gdn2'")]
)
def test_wrong_names_are_refused_before_data_is_read(arguments, wanted, tmp_path, capsys):
    assert main(["train", *arguments, "--data", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    assert wanted in capsys.readouterr().err
