"""The verifier `math`: verdicts that are known, and completions that are meant to hang it."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from rlhf_core.config.rewards.rewards import VerifierReward
from rlhf_core.errors import RewardError
from rlhf_core.rewards.verifier import Verifier

pytestmark = pytest.mark.parts

RIGHT = [
    # Fractions, decimals, percentages.
    (r"\frac{1}{2}", r"Half of it, so \boxed{0.5}."),
    ("0.5", r"We get \boxed{\frac{1}{2}}."),
    ("3/4", r"\boxed{\dfrac{6}{8}}"),
    ("-2/3", r"\boxed{-\frac{2}{3}}"),
    ("1/3", r"\boxed{0.333333}"),
    ("7", "Adding up gives 7"),
    ("1,234", r"\boxed{1234}"),
    ("1000000", r"\boxed{10^6}"),
    ("50%", r"\boxed{0.5}"),
    ("0.25", r"\boxed{25\%}"),
    ("12.5", r"The final answer is $12.50$."),
    # Units, text around the answer, several boxes.
    ("5", r"The rope is \boxed{5 \text{ cm}} long."),
    ("12 cm", r"\boxed{12}"),
    ("90", r"\boxed{90^\circ}"),
    ("18", r"She makes \$\boxed{18} a day."),
    ("42", r"First \boxed{41}. But that is wrong: \boxed{42}"),
    (r"$\frac{3}{5}$", r"Therefore $\frac{3}{5}$"),
    (r"\text{blue}", r"\boxed{\text{blue}}"),
    # Sets, intervals, tuples, several answers.
    (r"\{1, 2, 3\}", r"\boxed{\{3, 1, 2\}}"),
    ("1, 2", r"\boxed{2, 1}"),
    ("1, 2", r"\boxed{1} and \boxed{2}"),
    (r"\{\frac{1}{2}, 3\}", r"\boxed{\{3, 0.5\}}"),
    ("(0, 1]", r"\boxed{(0, 1]}"),
    (r"[2, \infty)", r"\boxed{[2, \infty)}"),
    (r"(-\infty, 1) \cup (2, \infty)", r"\boxed{(2, \infty) \cup (-\infty, 1)}"),
    ("(3, 4)", r"\boxed{(3,4)}"),
    # Matrices, surds, powers, constants.
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\boxed{\begin{pmatrix} 1 & 2 \\ 3 & 8/2 \end{pmatrix}}"),
    (r"\sqrt{8}", r"\boxed{2\sqrt{2}}"),
    (r"\frac{1}{\sqrt{2}}", r"\boxed{\frac{\sqrt{2}}{2}}"),
    ("2^{10}", r"\boxed{1024}"),
    (r"\pi/4", r"\boxed{\frac{\pi}{4}}"),
    ("1+2i", r"\boxed{2i+1}"),
    # Expressions and equations.
    ("x^2-1", r"\boxed{(x-1)(x+1)}"),
    ("2x+2y", r"\boxed{2(x+y)}"),
    ("5", r"\boxed{x=5}"),
    ("x=5", r"\boxed{5}"),
    ("y=2x+1", r"\boxed{y = 1 + 2x}"),
    ("x<3", r"\boxed{3 > x}"),
]  # fmt: skip
WRONG = [
    # Signs and near misses.
    ("5", r"\boxed{-5}"),
    (r"-\frac{1}{2}", r"\boxed{\frac{1}{2}}"),
    ("0.5", r"\boxed{0.51}"),
    ("1/3", r"\boxed{0.33}"),
    ("100", r"\boxed{101}"),
    ("42", r"First \boxed{42}. But that is wrong: \boxed{41}"),
    ("42", r"\boxed{41} or \boxed{42}"),
    ("50%", r"\boxed{5}"),
    ("500 cm", r"\boxed{5}"),
    ("x^2-1", r"\boxed{(x-1)^2}"),
    (r"\sqrt{8}", r"\boxed{2\sqrt{3}}"),
    (r"\pi", r"\boxed{3.14}"),
    ("y=2x+1", r"\boxed{y=2x-1}"),
    ("x<3", r"\boxed{x \le 3}"),
    # Sets, intervals, tuples, matrices.
    (r"\{1, 2, 3\}", r"\boxed{\{1, 2\}}"),
    ("1, 2", r"\boxed{1, 3}"),
    ("(0, 1]", r"\boxed{[0, 1]}"),
    ("(3, 4)", r"\boxed{(4, 3)}"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\boxed{\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}}"),
    # No answer.
    ("5", ""),
    ("5", "I do not know."),
    ("5", r"\boxed{}"),
    (r"\text{blue}", r"\boxed{\text{red}}"),
]  # fmt: skip
NEVER_ENDING = [
    "9**9**9",
    r"\boxed{9^{9^{9}}}",
    r"\boxed{10^{9}!}",
    r"\boxed{\int_0^1 e^{x^{x^x}} dx}",
    r"\boxed{\prod_{k=1}^{10000000} k}",
    r"\boxed{(a+b+c+d+e+f)^{60}}",
]
LONG = [
    r"\boxed{" + 800 * r"\frac{1}{" + "2" + 800 * "}" + "}",
    50_000 * "1+",
    " ".join(str(number) for number in range(17_000)),
    20_000 * "word ",
    14_000 * r"\boxed{",
    100_000 * "9",
    100_000 * "-",
    "\x00\ud800\u202e",
]


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    verifier = Verifier(VerifierReward(type="verifier", kind="math"))
    yield verifier
    verifier.close()


@pytest.mark.parametrize("pairs", [RIGHT, WRONG], ids=["right", "wrong"])
def test_known_verdicts(verifier: Verifier, pairs: list[tuple[str, str]]) -> None:
    result = verifier([text for _, text in pairs], [""] * len(pairs), [{"answer": answer} for answer, _ in pairs])
    expected = float(pairs is RIGHT)
    assert [pair for pair, reward in zip(pairs, result.rewards, strict=True) if reward != expected] == []
    assert result.scores == result.rewards
    assert result.extra == {"timed_out": [0.0] * len(pairs)}


def test_there_are_sixty_pairs() -> None:
    assert len({*RIGHT, *WRONG}) == len(RIGHT) + len(WRONG) >= 60


@pytest.mark.slow("each of several completions is stopped at its time limit, and its process loads SymPy again")
def test_a_hostile_completion_is_wrong_and_the_next_one_is_judged() -> None:
    verifier = Verifier(VerifierReward(type="verifier", kind="math", timeout_seconds=2.0))
    hostile = [*NEVER_ENDING, *LONG]
    texts = [text for one in hostile for text in (one, r"\boxed{5}")]
    result = verifier(texts, [""] * len(texts), [{"answer": "5"}] * len(texts))
    assert result.rewards == [0.0, 1.0] * len(hostile)
    assert result.extra["timed_out"][: 2 * len(NEVER_ENDING)] == [1.0, 0.0] * len(NEVER_ENDING)
    verifier.close()


def test_an_answer_after_100_kb_of_text_is_found(verifier: Verifier) -> None:
    text = 4000 * "so $x = 3$ and then 12. " + r"Therefore \boxed{\frac{10}{2}}."
    assert verifier([text], [""], [{"answer": "5"}]).rewards == [1.0]


def test_a_pattern_gives_the_answer_alone() -> None:
    verifier = Verifier(VerifierReward(type="verifier", kind="math", pattern="<answer>(.*?)</answer>"))
    texts = [r"<answer>\frac{1}{2}</answer>", r"<answer>1/3</answer> \boxed{0.5}", r"\boxed{0.5}"]
    texts.append(f"<answer>{10_000 * '9'} 0.5</answer>")
    result = verifier(texts, [""] * 4, [{"answer": "0.5"}] * 4)
    assert (result.rewards, result.extra["timed_out"]) == ([1.0, 0.0, 0.0, 0.0], [0.0] * 4)
    verifier.close()


def test_its_processes_have_a_limit_of_memory() -> None:
    before = set(psutil.Process().children())
    verifier = Verifier(VerifierReward(type="verifier", kind="math"))
    assert verifier(["5"], [""], [{"answer": "5"}]).rewards == [1.0]
    (process,) = set(psutil.Process().children()) - before
    limit, _ = process.rlimit(psutil.RLIMIT_AS)
    assert 2 * 2**30 < limit < 6 * 2**30
    verifier.close()


def test_a_row_whose_answer_is_no_mathematics_is_an_error(verifier: Verifier) -> None:
    with pytest.raises(RewardError, match=r"completion 1 .*no mathematics is found in the row's `answer`, '\$'"):
        verifier(["5", "5"], ["", ""], [{"answer": "5"}, {"answer": "$"}])
    with pytest.raises(RewardError, match="the dataset row r has no column 'answer'"):
        verifier(["5"], [""], [{"id": "r"}])


def test_a_row_whose_answer_never_ends_is_an_error() -> None:
    verifier = Verifier(VerifierReward(type="verifier", kind="math", timeout_seconds=1.0))
    with pytest.raises(RewardError, match="verifier math:equivalent did not return within 1 s and was stopped"):
        verifier(["5"], [""], [{"answer": 2000 * r"\frac{1}{" + "2" + 2000 * "}"}])
    assert verifier(["5"], [""], [{"answer": "5"}]).rewards == [1.0]
    verifier.close()
