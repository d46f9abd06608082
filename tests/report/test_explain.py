"""The worked examples of the method's definition, exactly, and its identities on arbitrary numbers."""

import math
import subprocess
import sys

import numpy as np
import pytest

from qed.report.explain import NON_NORMAL, WORKED, edit, explain, transition


def test_worked_example_is_exact():
    one = edit(**WORKED)
    np.testing.assert_allclose(one.d, [0, 0.4], atol=1e-15)
    np.testing.assert_allclose(one.state_gdn2, [2, 3], atol=1e-15)
    np.testing.assert_allclose(one.state_qed, [1.76, 3], atol=1e-15)
    values = [one.residual_gdn2, one.output_gdn2, one.content, one.output_qed, one.output_qed - one.output_gdn2]
    np.testing.assert_allclose(values, [0, 3.6, 1.2, 3.456, -0.144], atol=1e-14)


def test_non_normal_example_is_exact():
    two = transition(**NON_NORMAL)
    np.testing.assert_allclose(two.a, [0.5, 0.1], atol=1e-15)
    np.testing.assert_allclose(two.matrix, [[0.5, -0.1], [0, 1]], atol=1e-15)
    np.testing.assert_allclose(sorted(two.eigenvalues), [0.5, 1])
    assert np.linalg.norm(two.image) == pytest.approx(math.sqrt(1.01), abs=1e-15)
    assert two.norm == pytest.approx(np.linalg.norm(two.matrix, 2))


@pytest.mark.parametrize("seed", range(5))
def test_identities_hold_for_arbitrary_numbers(seed):
    generator = np.random.default_rng(seed)
    k, q, state = generator.normal(size=(3, 2))
    b, value, strength = generator.random(2), generator.normal(), generator.normal()
    one = edit(k, q, b, state, value, strength)
    assert one.d @ one.k == pytest.approx(0, abs=1e-15)
    np.testing.assert_allclose(one.state_qed - one.state_gdn2, -strength * one.k * one.content, atol=1e-13)
    assert one.output_qed - one.output_gdn2 == pytest.approx(-strength * one.rho * one.content, abs=1e-13)
    two = transition(k, q, b, strength)
    np.testing.assert_allclose(np.sort(np.linalg.eigvals(two.matrix).real), np.sort(two.eigenvalues), atol=1e-12)


def test_text_shows_every_step_of_both_examples():
    text = explain()
    for shown in (
        "(0, 0.4)",
        "= 1.2",
        "(-0.24, 0)",
        "(1.76, 3)",
        "3.456",
        "-0.144",
        "{0.5, 1}",
        "√1.01",
        "longer than x",
    ):
        assert shown in text


def test_the_readers_own_numbers_replace_the_examples():
    text = explain(q=(0, 2), strength=-0.5)
    assert "q scaled to length 1" in text
    assert "ρ = 0: this step's output stays" in text
    assert "a = (0.5, -0.25)" in text


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_figure_is_written(tmp_path, ending):
    path = tmp_path / f"example.{ending}"
    explain(figure=path)
    assert path.read_bytes()[:5] in (b"<?xml", b"\x89PNG\r")


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"k": (0, 0)}, "k must have a direction"),
        ({"q": (1, 2, 3)}, "q must be two finite numbers"),
        ({"b": (0.5, 1.5)}, "gates between 0 and 1"),
        ({"value": math.nan}, "must be finite numbers"),
        ({"figure": "example.pdf"}, "must end in .svg or .png"),
    ],
)
def test_wrong_numbers_are_refused_by_name(numbers, message):
    with pytest.raises(ValueError, match=message):
        explain(**numbers)


def test_explaining_needs_no_torch():
    code = "import sys\nfrom qed.report.explain import explain\nexplain()\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
