"""`MathReward` on answers as data sets of mathematics write them, and on hostile ones."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forge_env as fe
from forge_env.errors import UsageError
from forge_env.rewards.math import last_boxed, marked_answer
from forge_env.rewards.quantities import quantity, spelled

r = fe.rewards


async def score(target: Any, response: str) -> float:
    scored = r.MathReward()("", response, target)
    return await scored if isinstance(scored, Awaitable) else scored


# (target, answers that are right, answers that are wrong), in the style of MATH-500, OlympiadBench, college_math,
# GSM8K, AIME and Minerva.
ANSWERS: list[tuple[str, list[str], list[str]]] = [
    # numbers
    ("18", ["18.0", "18 apples", "+18", r"\text{(B) }18", "3 \\cdot 6", "9 + 9 = 18"], ["81", "18 or 19", "18x"]),
    ("1,234", ["1234", "1{,}234", r"1,\!234", "1,234.00"], ["1.234", "1, 234", "234"]),
    (r"\$41,\!250", [r"\$41,250", "41250", "41,250 dollars"], ["41", "41, 250", "41250 cents"]),
    (r"11,\! 111,\! 100", ["11111100"], ["11"]),
    (r"\log_2 3", [r"\log_{2}{3}", r"\log_{2} 3", r"\frac{\ln 3}{\ln 2}"], [r"\log_3 2", r"\log_2 9", "6"]),
    ("-7", ["\u22127", "- 7", "-7.0"], ["7", "0-8"]),
    ("0.05", [r"\frac{1}{20}", "5\\%", ".05"], ["0.5", "5"]),
    ("17.5%", [r"17.5\%", "0.175"], ["17.5", "175"]),
    (r"\frac43", [r"\dfrac{4}{3}", "4/3", r"1\frac13", "1 1/3"], [r"\frac34", "4", r"\frac{1}{43}"]),
    (r"2\frac{1}{3}", [r"\frac{7}{3}", "2 1/3", "7/3"], ["2", "1/3", r"\frac{2}{3}", "3"]),
    ("1/3", [r"\frac13", r"\tfrac{1}{3}", "0.333333"], ["0.33", "3", "13"]),
    ("7.4e-12", [r"7.4 \times 10^{-12}", "7.4\u00d710\u207b\u00b9\u00b2"], ["1.39e-10", "7.4e-11", "0"]),
    (r"\frac{1}{10^9}", ["10^{-9}", "1e-9"], ["2e-9", "10^{-8}", "0"]),
    ("2500", [r"2.5 \times 10^{3}", r"2.5 \cdot 10^3", "50^2"], ["2.5", "10^3"]),
    ("9", ["3^2", r"\sqrt{81}", "x = 9", "10 - 1"], ["3", "32", "9x"]),
    ("033", ["33"], ["330"]),
    ("5", ["5.", "5\u20ac", r"\$5"], ["5...", "5 lakh", "5 dozen", "5 mil"]),
    ("-5", ["\u20135", "\u22125"], ["5", "3\u20135"]),
    ("1000000", ["1 million", r"1\text{ million}", "10 lakh"], ["1", "1 billion", "1 millionth"]),
    (r"2\frac12", ["2\u00bd", "5/2"], ["\u00bd", "2"]),
    (r"\frac{41}{333}", [r"0.\overline{123}", r"0.\bar{123}"], ["0.123", r"0.\overline{12}", r"-0.\overline{123}"]),
    (r"\sqrt[3]{2}", [r"\sqrt[3] 2", "2^{1/3}"], [r"\sqrt 2", r"3\sqrt 2"]),
    (r"\emptyset", [r"\varnothing", r"\{\}", "\u2205"], ["0", r"\{0\}"]),
    (r"(1,\infty)", ["x > 1", "1 < x"], [r"x \ge 1", "x < 1", "1"]),
    (r"(-\infty,3)\cup(7,\infty)", ["(-oo,3) U (7,oo)", r"x<3 \text{ or } x>7"], ["(-oo,3) U (8,oo)", "(-oo,3)"]),
    (r"\frac{-1\pm\sqrt{5}}{2}", [r"\frac{-1+\sqrt5}{2}, \frac{-1-\sqrt5}{2}"], [r"\frac{-1+\sqrt5}{2}"]),
    (r"2\pm\sqrt{3}", [r"2+\sqrt3, 2-\sqrt3", r"x = 2\mp\sqrt3"], [r"2+\sqrt3", r"3\pm\sqrt2"]),
    ("(3,4)", ["x=3, y=4", r"x=3 \text{ and } y=4"], ["x=4, y=3", "x=3", "x=3, y=4, z=5"]),
    ("1011_2", ["(1011)_2", r"1011_{\text{two}}"], ["1011", "(1011)_3", r"1011_{\text{three}}", "10.11_2"]),
    ("3:2", ["3 to 2"], ["2 to 3", "3", "3:.2"]),
    ("x_1", ["x_{1}"], ["X_1"]),
    (r"5\text{ m/s}", [r"5 \mathrm{~m} / \mathrm{s}"], [r"5 \mathrm{~km} / \mathrm{h}", r"5 \mathrm{~m}"]),
    (r"\sqrt[3]{5}", ["\u221b5"], ["\u221a5"]),
    # units
    (r"30^\circ", ["30", "30\u00b0", "30 degrees", r"30^{\circ}"], ["60", r"30 \text{ radians}"]),
    (r"864 \mbox{ inches}^2", ["864", r"864\text{ in}^2", "864 square inches"], ["862", r"864 \text{ cm}^2"]),
    ("5 km", ["5", "5 kilometers", r"5\text{ km}"], ["5 miles", r"5 \text{ m}", "50"]),
    (r"12\pi \text{ cm}", [r"12\pi", r"12 \pi\mathrm{~cm}"], [r"12\pi \text{ m}", "12", r"21\pi"]),
    ("20 $cm^{2}$", ["20", r"20 \text{ cm}^2", "$20$ square centimeters"], ["20 cm^3", "200"]),
    (r"$\$ 4$", ["4", r"\$4", "4.00"], ["40", "4 euros"]),
    ("20 km/h", ["20"], ["20 mph", "2"]),
    # letters are variables, not units
    ("4n", ["4 n", r"4 \cdot n", "3n + n"], ["4", "4m", "4n^2", "4N"]),
    ("4n^2", [r"(2n)^2"], ["4", "4n"]),
    ("5r^5", [r"5 r^{5}"], ["5", "5r", "5^5"]),
    ("a - b", ["a-b", "-b+a"], ["b - a", "a"]),
    ("2k+2", ["2(k+1)"], ["2", "2k", "2k-2"]),
    (r"\frac{7 m+3}{9}", [r"\frac{3+7m}{9}"], [r"\frac{7m}{9}", "7/9"]),
    # roots and constants
    (r"6\sqrt3", [r"6\sqrt{3}", r"\sqrt{108}", "6*sqrt(3)", "6\u221a3"], ["6", "63", r"3\sqrt6"]),
    (r"\frac{\sqrt{3}}{2}", ["sqrt(3)/2", r"\frac{3}{2\sqrt{3}}"], [r"\frac{\sqrt{2}}{3}", "0.87"]),
    (r"288 \pi", ["2*144*pi", r"288\pi"], ["288", r"28\pi"]),
    (r"\frac{20000}{\pi}", [r"20000/\pi"], ["20000"]),
    (r"\binom{2n}{n}", [r"\frac{(2n)!}{n!n!}"], ["2"]),
    (r"\infty", [r"\infty"], ["0", r"-\infty"]),
    # complex numbers
    ("5 - 3i", ["5-3i", "-3i+5"], ["5", "5+3i", "5-3"]),
    ("1+274i", ["274i + 1", "274 i+1"], ["1+275i", "275"]),
    ("2i", ["(1+i)^2", "2 i", r"\frac{-2}{i}"], ["2", "-2i", "(1-i)^2"]),
    (r"\frac{-1+i \sqrt{3}}{2}", [r"-\frac12 + \frac{\sqrt3}{2} i"], [r"\frac{1+i\sqrt3}{2}"]),
    # formulas and equations
    (r"x^2 - 1", [r"(x-1)(x+1)", "x**2 - 1"], [r"(x-1)^2", "x^2", "x^2+1"]),
    ("x=5", ["5", "x = 5"], ["y=5", "x=-5", "x"]),
    ("y = 2 x - 4", ["y=2(x-2)", "2x - y = 4"], ["y=2x+4", "x = 2y - 4"]),
    ("2+3=5", ["2 + 3 = 5", "5"], ["2+3=6", "2"]),
    ("f(x)=x+22", ["f(x) = 22+x"], ["f(x)=x+2", "f(x)=22x"]),
    ("y'=2x", ["y' = 2x"], ["y=2x", "y''=2x"]),
    (r"x \ge - 3", [r"x\geq-3", r"x \geqslant -3", r"-3 \le x"], ["x > -3", r"x \le -3", "-3"]),
    (r"x \neq - 2", [r"x\ne-2"], ["x = -2", r"x \neq 2", "-2"]),
    (r"10 n+3", ["3+10n"], ["10", "13n"]),
    (r"2^{n}-n-1", [r"2^n - (n+1)"], [r"2^{n-n-1}", r"2^n-n+1"]),
    (r"\cos ^{2} x", [r"1-\sin^2 x"], [r"\cos x", r"\sin^2 x"]),
    # lists and sets: any order, every element once
    ("4,9", ["9, 4", r"\{4, 9\}", r"4 \text{ and } 9", "4 and 9"], ["49", "4", "4.9", "(4,9)", "4,9,9"]),
    (r"\{3,8\}", [r"\{8,3\}", "3, 8"], ["38", "(3,8)", "3"]),
    ("1,1,2", ["1,2,1"], ["1,2", "1,2,2"]),
    ("x = 1 or x = 2", ["1, 2", "x=2 or x=1"], ["1", "x = 1"]),
    (r"1 \pm \sqrt{19}", [r"1+\sqrt{19}, 1-\sqrt{19}"], [r"1+\sqrt{19}", r"1\pm\sqrt{91}"]),
    ("$69$,$84$", ["69, 84", "84,69"], ["69", "6984"]),
    # pairs, tuples, intervals, matrices: in order, with their brackets
    ("(15,-29)", [r"\left(15, -29\right)", "(15, -29)"], ["(-29,15)", "15,-29", "(8,-2)", "[15,-29]"]),
    (r"\left( 3, \frac{\pi}{2} \right)", [r"(3,\pi/2)"], [r"(\frac{\pi}{2},3)", "3"]),
    ("(1,1006),(3,331)", ["(3,331),(1,1006)"], ["(1,1006)", "(1006,1),(3,331)", "1,1006,3,331"]),
    ("(0, 1]", [r"x \in (0,1]", r"\left(0,1\right]"], ["(0, 1)", "[0,1]", "0,1"]),
    (r"(-\infty,0]\cup\{1\}", [r"\{1\} \cup (-\infty, 0]"], [r"(-\infty,0]", r"(-\infty,1]"]),
    (r"\begin{pmatrix} -7 \\ 1 \end{pmatrix}", [r"\begin{bmatrix}-7\\1\end{bmatrix}"], ["(-7, 1)"]),
    # words, choices, and what is no number at all
    (r"\text{Evelyn}", ["Evelyn", "evelyn."], ["Evan", "Angela"]),
    (r"\text{east}", ["East"], ["seat", "west"]),
    ("no solution", ["No solution."], ["0", "a solution", "one solution"]),
    (r"\text{(E)}", ["E", "(E)", r"\textbf{(E)}", r"\text{(E)}\ 12"], ["e", "(D)", "2.718"]),
    ("D", ["(D)", "D."], ["B", "d"]),
    ("204_5", ["204_{5}"], ["204", "204_6", "54"]),
    ("2 : 1", ["2:1"], ["2", "1:2"]),
]  # fmt: skip
ANSWERS += [
    ("x+y=2", ["x + y = 2", "y+x=2"], ["2", "x+y=3"]),
    ("xy=6", [], ["6"]),
    ("|x|=3", [], ["3"]),
    ("a+b=c", [], ["c"]),
    ("x-y=3, x+y=5", ["x+y=5, x-y=3"], ["3, 5"]),
    ("x=5", ["5"], ["6"]),
    ("f'(x)=2x", ["2x"], ["x"]),
    (r"\angle A = 30^\circ", ["30"], ["31"]),
    ("5", [r"5\text{ cm2}"], [r"5 \approx 6", r"5 \ldots", r"5\text{6}", r"5 \textbf{6}", r"5 \approx 5.2"]),
    (r"\sqrt{2}", [r"\sqrt2 \approx 1.41", r"\sqrt2 ≈ 1.414 \text{ cm}"], [r"\sqrt2 \approx \sqrt3", "\\sqrt2 ≈ 1.5"]),
    (r"4\sqrt{3}", [r"4\sqrt{3}\text{ square units}", r"4\sqrt3\text{ sq. cm}"], [r"5\sqrt3\text{ square units}"]),
    (r"36\pi", [r"36\pi\text{ sq. units}", r"36\pi\text{ cubic feet}"], [r"36\pi \text{ or so}"]),
    (r"p \equiv 1 \pmod 4", [r"p \equiv 1 \pmod{4}"], [r"p \equiv 1 \pmod{5}", r"p \equiv 3 \pmod{4}"]),
    (r"\text{2 and 3}", ["2, 3", "3, 2"], ["2", "2, 4"]),
    ("2:30 pm", ["2:30 PM", "2:30 p.m."], ["2:30 am", "2:30"]),
    ("1234567", ["1 234 567"], ["1 234 568", "1 234 56"]),
    (r"\frac12", [r"\sin 30^\circ", r"\cos(60^{\circ})"], [r"\sin 31^\circ"]),
    (r"\mathbb{R}", [r"(-\infty,\infty)"], [r"[0,\infty)", r"\mathbb{Q}"]),
    (r"\log_{10} 2", [r"\lg 2"], [r"\ln 2"]),
    (
        r"(-\infty,-2)\cup(3,\infty)",
        [r"x<-2 \text{ or } x>3", "x > 3 or x < -2"],
        [r"x \le -2 \text{ or } x>3", r"x<-2 \text{ or } y>3", r"x<-2 \text{ and } x>3"],
    ),
]
# numbers of other locales, turned brackets, set builders, named tuples, labels, temperatures
ANSWERS += [
    ("7654321", ["7.654.321", "7'654'321", "76,54,321", "7 654 321,0"], ["7.654", "765,43,21"]),
    ("1234.5", ["1.234,5", "1 234,5", "1'234.5", "\u200b1,234.5"], ["1.234", "12.345"]),
    ("(-2,7)", ["]-2, 7[", "(-2; 7)", r"\{x \mid -2 < x < 7\}", "(x, y) = (-2, 7)"], ["[-2; 7[", "(x, y) = (7, -2)"]),
    (r"\{t \in \mathbb{R} : t \ge 5\}", [r"[5, \infty)", r"t \ge 5"], [r"(5, \infty)"]),
    (r"\textbf{(C) }\frac{7}{8}", ["C", r"\frac78"], ["D", "7", "c"]),
    (r"41^\circ\text{C}", ["41", "41°C", r"41^\circ C"], ["41°F"]),
    (r"8\sqrt{5}", [r"8\sqrt{5} cm", r"8 \sqrt 5 km"], [r"8\sqrt{5} x"]),
    (r"\frac{5}{9}", [r"\nicefrac{5}{9}", r"\sfrac59"], ["5:9"]),
]
RIGHT = [(target, answer) for target, right, _ in ANSWERS for answer in right]
WRONG = [(target, answer) for target, _, wrong in ANSWERS for answer in wrong]


@pytest.mark.slow
async def test_answers_of_data_sets_are_read_whole() -> None:
    right = await asyncio.gather(*(score(target, rf"\boxed{{{answer}}}") for target, answer in RIGHT))
    assert [pair for pair, reward in zip(RIGHT, right, strict=True) if reward != 1.0] == []
    wrong = await asyncio.gather(*(score(target, f"<answer>{answer}</answer>") for target, answer in WRONG))
    assert [pair for pair, reward in zip(WRONG, wrong, strict=True) if reward == 1.0] == []


SPELLINGS = [
    r"so \boxed{%s}",
    "<answer> %s </answer>",
    "#### %s",
    r"<answer>\boxed{%s}</answer>",
    "<answer>**%s**.</answer>",
]


@pytest.mark.parametrize("marked", SPELLINGS)
async def test_every_target_is_its_own_answer(marked: str) -> None:
    targets = [target for target, *_ in ANSWERS]
    assert [target for target in targets if await score(target, marked % target) != 1.0] == []
    assert all(r.MathReward().check_target(target) is None for target in targets)


@pytest.mark.slow
async def test_no_target_is_the_answer_to_another() -> None:
    rng = random.Random(0)
    targets = [target for target, *_ in ANSWERS]
    right = {target: {target, *answers} for target, answers, _ in ANSWERS}
    pairs = [(one, other) for one in targets for other in targets if right[one].isdisjoint(right[other])]
    pairs = rng.sample(pairs, 300)
    rewards = await asyncio.gather(*(score(one, rf"\boxed{{{other}}}") for one, other in pairs))
    assert [pair for pair, reward in zip(pairs, rewards, strict=True) if reward == 1.0] == []


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{42}",
        r"<answer>\boxed{42}</answer>",
        r"<answer>It is \boxed{\text{42}}, since 6 * 7 is.</answer>",
        "<answer>**42**</answer>",
        "<answer>The answer is: **$42$**.</answer>",
        r"\fbox{42}",
        r"the answer is $\boxed 42$.",
        r"\boxed{42}, not \boxed{ }",
        r"$\boxed{\boxed{42}}$",
        r"<answer>\(42\)</answer>",
        "work\n#### $42$",
        "work\n#### **42**",
    ],
)
def test_what_is_around_a_marked_answer_is_taken_away(response: str) -> None:
    assert r.MathReward()("", response, "42") == 1.0


async def test_joined_boxes_are_a_list() -> None:
    for response in (r"\boxed{3} and \boxed{4}", r"$\boxed{4}$, $\boxed{3}$", r"\boxed{4} \text{ or } \boxed{3}"):
        assert await score("3,4", response) == 1.0
        assert await score("4", response) < 1.0
    assert await score("4", r"Not \boxed{3}, but \boxed{4}.") == 1.0


def test_thoughts_are_not_the_answer() -> None:
    reward = r.MathReward()
    assert reward("", r"<think>\boxed{7}</think> I don't know.", "7") == 0.0
    assert reward("", r"<think>\boxed{8}</think> It is \boxed{7}.", "7") == 1.0


@pytest.mark.parametrize(
    "target", ["5", "-3", "1,234.5", "$5", "3/4", "50%", "\\frac{1}{2}", "18 apples", "5 km", "four"]
)
def test_numbers_and_words_need_no_algebra(target: str) -> None:
    assert isinstance(r.MathReward()("", f"<answer>{target}</answer>", target), float)
    assert isinstance(r.MathReward()("", "<answer>17</answer>", target), float)


def test_a_number_is_near_only_where_all_of_it_is() -> None:
    reward = r.MathReward()
    assert reward("", "It is 1,234 or so.", "1234") == reward("", "4,9 it is", "9") == 0.1
    assert reward("", "4,9 it is", "49") == 0.0


# --- Hostile answers

HOSTILE = [
    r"9^{9^{9^{9^{9}}}}!",
    "10**10**10",
    r"10^{10^{10}}",
    "(" * 900,
    "{" * 900,
    r"\frac{" * 160,
    r"\sqrt" * 190,
    "1e" * 490,
    "5 a" + " " * 900 + "!",
    "9" * 100_000,
    r"\boxed{" * 10_000 + "}" * 10_000,
    "__import__('os').system('touch /tmp/hacked')",
    "\x00",
    "\ud800",
    "",
]


@pytest.mark.slow
async def test_a_hostile_answer_is_wrong_in_bounded_time_and_the_event_loop_goes_on() -> None:
    steps = 0

    async def count() -> None:
        nonlocal steps
        while True:
            await asyncio.sleep(0.01)
            steps += 1

    counting = asyncio.create_task(count())
    for answer in HOSTILE:
        assert await score(r"\sqrt{8}", f"<answer>{answer}</answer>") == 0.0
    counting.cancel()
    assert steps > 10
    assert await score(r"\sqrt{8}", r"\boxed{2\sqrt{2}}") == 1.0


PIECES = st.sampled_from(
    [
        "<answer>",
        "</answer>",
        r"\boxed{",
        "}",
        "{",
        "#### ",
        "\n",
        "$",
        "**",
        r"\frac",
        "1",
        "2",
        ",",
        "/",
        "^",
        "x",
        " ",
    ]
)
RESPONSES = st.lists(st.one_of(PIECES, st.text(max_size=5)), max_size=30).map("".join)


@given(
    response=RESPONSES, target=st.one_of(st.integers(), st.sampled_from([target for target, *_ in ANSWERS]), RESPONSES)
)
def test_no_response_raises(response: str, target: Any) -> None:
    scored = r.MathReward()("", response, target)
    if isinstance(scored, float):
        assert scored in (0.0, 0.1, 1.0)
    else:
        scored.close()  # algebra is left to the process, which `test_a_hostile_answer...` covers
    assert r.MathReward().check_target(target) is None or isinstance(target, str)


@given(st.text(alphabet="0123456789,./-+e%$ \\{}fracx", max_size=40))
def test_spelling_an_answer_anew_leaves_its_value(text: str) -> None:
    assert spelled(spelled(text)) == spelled(text) or quantity(text) is None
    number = quantity(text)
    assert number is None or quantity(f" {text}") == number


def test_comparisons_work_in_threads_with_loops_of_their_own() -> None:
    rewards: list[float] = []

    def compare() -> None:
        rewards.append(asyncio.run(score(r"\sqrt{8}", r"\boxed{2\sqrt{2}}")))

    threads = [threading.Thread(target=compare) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rewards == [1.0] * 3


# --- Targets that can't be compared are named when tasks are loaded

UNSCORABLE = [
    (None, "no target"),
    ("", "empty"),
    ("  $ $ ", "empty"),
    (r"\frac{1}{", "truncated"),
    ("(((", "truncated"),
    (r"\sin(2", "truncated"),
    ("9" * 1_001, "more than 1000 characters"),
    (["4", "9"], "a list"),
]


@pytest.mark.parametrize(("target", "reason"), UNSCORABLE)
async def test_a_target_that_no_answer_can_equal_is_named(target: Any, reason: str) -> None:
    assert reason in (r.MathReward().check_target(target) or "")
    if target is not None:
        assert await score(target, r"\boxed{1}") == 0.0


class Sums(fe.SingleTurnEnvironment):
    """Two tasks, of which the second has half a target."""

    api_version = 1
    reward = r.MathReward()

    def tasks(self, split: str) -> list[fe.Task]:
        targets = ["7", r"\frac{1}{"]
        return [
            fe.Task(id=f"{split}-{number}", prompt=f"Task {number}", data={"answer": target}, split=split)
            for number, target in enumerate(targets)
        ]


def test_an_evaluation_names_them_before_anything_is_played(tmp_path: Any) -> None:
    played: list[str] = []

    def agent(messages: list[fe.Message], tools: Any) -> str:
        played.append("once")
        return "7"

    with pytest.raises(UsageError, match=r"1 task of Sums can't be scored: eval-1: .* is truncated"):
        fe.evaluate(Sums, agent, out=str(tmp_path / "out"))
    assert not played


async def test_validation_names_them() -> None:
    from forge_env.validation.checks import Validator

    checks = [check async for check in Validator(Sums, num_tasks=2).run()]
    assert any(
        check.status == "failed" and "eval-1" in check.detail and "truncated" in check.detail for check in checks
    )


# --- Marks


def test_boxes_may_hold_braces() -> None:
    assert marked_answer(r"a \boxed{1} b \boxed{\frac{1}{\sqrt{\frac{2}{3}}}} c") == r"\frac{1}{\sqrt{\frac{2}{3}}}"
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed(r"\boxed{1} \boxed{2") == "1"
    assert last_boxed("no box {1}") is None
    assert last_boxed(r"$\boxed{5}$, $\boxed{5}$") == "5"
    assert marked_answer("Put it in \\boxed.\n#### 42") == "42"
    assert marked_answer(r"I will use \boxed at the end.") is None
    begun = time.perf_counter()
    last_boxed(r"\boxed{" * 100_000)
    last_boxed(", ".join(rf"\boxed{{{number}}}" for number in range(50_000)))
    assert last_boxed(r"\boxed{1}" + "\n" * 100_000 + r"\boxed{2}") == "2"
    assert time.perf_counter() - begun < 5


@given(st.text(alphabet="\\boxed{}12 ", max_size=60))
def test_any_text_has_a_box_or_none(text: str) -> None:
    found: Any = last_boxed(text)
    assert found is None or f"{{{found}}}" in text
