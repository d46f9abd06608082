import argparse
from dataclasses import replace

import pytest
import torch

from qed.bench import add_arguments, bench, measure, peers, run, worker
from qed.bench.work import LEAVES, Shape, backward_bytes, definition, forward_bytes, forward_flops, make_tensors
from qed.ops import gated_delta_rule
from qed.records import read_json

TINY = Shape(2, 12, 2, 8, 8)
CEILINGS = {"copy_bytes_per_s": 1e10, "matmul_flop_per_s": 1e11}


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(measure, "MIN_REPEATS", 3)
    monkeypatch.setattr(measure, "MAX_REPEATS", 3)


def rows(name, shape=TINY):
    return list(worker.rows_of(name, shape, "cpu", CEILINGS))


@pytest.mark.parametrize("name", ["qed", "gdn2", "core", "reference"])
def test_a_row_holds_time_errors_and_roofline_share(quick, name):
    forward, both = rows(name)
    assert (forward["work"], both["work"]) == ("forward", "forward+backward")
    assert set(both["errors"]) == {"o", *(f"d{leaf}" for leaf in LEAVES[forward["system"]])}
    for row in (forward, both):
        assert row["status"] == "ok"
        assert max(row["errors"].values()) < 1e-5
        assert set(row["limits"]) == set(row["errors"])
        assert row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert row["roofline_share"] == pytest.approx(row["floor_ms"] / row["median_ms"])


def test_a_wrong_peer_is_not_timed(quick, monkeypatch):
    def wrong(x):
        q, k, v, a, g = (x[name] for name in LEAVES["core"])
        return gated_delta_rule(q, k, v, a * 0.9, g)

    def broken(x):
        raise RuntimeError("no such kernel")

    def hungry(x):
        raise torch.OutOfMemoryError("too much")

    def nan(x):
        o, state = gated_delta_rule(*(x[name] for name in LEAVES["core"]))
        return o * float("nan"), state

    core = peers.PEERS["core"]
    for call, status in (
        (wrong, "failed the error rule"), (nan, "failed the error rule"), (broken, "failed"), (hungry, "out of memory")
    ):  # fmt: skip
        monkeypatch.setitem(peers.PEERS, "core", replace(core, call=call))
        for row in rows("core"):
            assert row["status"] == status
            assert "median_ms" not in row


def test_the_check_covers_the_first_tokens_of_a_long_sequence(quick, monkeypatch):
    def wrong_after_eight(x):
        q, k, v, a, g = (x[name] for name in LEAVES["core"])
        o, state = gated_delta_rule(q, k, v, a, g)
        return torch.cat([o[:, :8], 2 * o[:, 8:]], 1), state

    monkeypatch.setitem(peers.PEERS, "core", replace(peers.PEERS["core"], call=wrong_after_eight))
    assert [row["status"] for row in rows("core")] == ["failed the error rule"] * 2
    monkeypatch.setattr(worker, "CHECKED_TOKENS", 8)
    assert [row["status"] for row in rows("core")] == ["ok"] * 2


def test_a_slowed_card_is_a_status(monkeypatch):
    rates = iter([100.0, 60.0])
    monkeypatch.setattr(worker, "matmul_flop_per_s", lambda device: next(rates))
    job = worker.Job(peers.PEERS["qed"], TINY, "cuda", {"matmul_flop_per_s": 100.0}, {}, {}, False)
    _, steady = worker._steadily(job, lambda: measure.summarize([1.0, 1.0]))
    assert steady == {"matmul_share": 0.6, "status": "card slowed to 60%"}


def test_a_missing_library_is_a_status(monkeypatch):
    monkeypatch.setitem(peers.PEERS, "core", replace(peers.PEERS["core"], library="no_such_library"))
    assert [row["status"] for row in rows("core")] == ["not installed"] * 2


def test_every_system_has_one_definition():
    x = {name: y.double() for name, y in make_tensors(TINY, "cpu").items()}
    a = {system: definition(system, x)[3] for system in LEAVES}
    assert torch.equal(a["core"], x["a"])
    torch.testing.assert_close(a["dplr"], x["a"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(a["qed"], x["a"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a["gdn2"], a["gdn2-prepared"], rtol=1e-5, atol=1e-6)


def test_bytes_and_operations_of_the_training_shape():
    shape = Shape(16, 2048)
    assert shape.token_heads == 196_608
    # 2 KB and about 180 kFLOP a token-head
    assert forward_bytes(shape, "gdn2-prepared") == 196_608 * 2048
    assert 165e3 < forward_flops(shape) / shape.token_heads < 185e3
    # read q k b v w do (16-bit) and g (32), write a gradient for each input
    assert backward_bytes(shape, "gdn2-prepared") == 196_608 * 128 * (2 * 14 + 2)


def test_run_writes_rows_prints_a_table_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(run.SHAPES, "cpu", [TINY, replace(TINY, batch=1, length=24)])
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = ["--device", "cpu", "--out", str(tmp_path)]
    assert bench(parser.parse_args(["run", *args, "--peers", "qed", "gdn2"])) == 0
    result = read_json(tmp_path / "cpu.json")
    assert result["provenance"]["commit"]
    assert len(result["rows"]) == 2 * 2 * 2
    assert (tmp_path / "cpu-overhead.svg").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert printed.count("QED over GDN-2 in our kernels") == 4
    (tmp_path / "cpu.json").rename(tmp_path / "another-card.json")
    assert bench(parser.parse_args(["show", "--device", "another-card", "--out", str(tmp_path)])) == 0
    for figure in ("time", "overhead"):
        assert (tmp_path / f"another-card-{figure}.svg").read_bytes() == (tmp_path / f"cpu-{figure}.svg").read_bytes()
    with pytest.raises(ValueError, match="did you mean 'fla chunk_kda'"):
        bench(parser.parse_args(["run", *args, "--peers", "fla chunk_kd"]))


def test_a_process_over_its_time_is_a_status_and_keeps_its_rows(tmp_path):
    args = argparse.Namespace(device="cpu")
    worker = run._start(["qed"], [TINY], args, {"ceilings": CEILINGS}, tmp_path)
    worker.out.write_text('{"peer": "qed", "status": "ok"}\n{"peer": "cut sh')
    rows = worker.finish(0.01)
    assert [row["status"] for row in rows] == ["ok", "timed out after 0 s"]
    assert "median_ms" not in rows[1]
    assert worker.process.returncode != 0
