"""Environment that marks each guess letter by letter, until the word is found or the guesses run out."""

from __future__ import annotations

import re
from collections import Counter
from random import Random

from pydantic import Field

import forge_env as fe
from environments.wordle.words import LENGTH, words_of
from forge_env.environment.tool_environment import ToolEnvironmentConfig
from forge_env.types import Message, Observation, Task

_TAGGED = re.compile(r"<guess>\s*([A-Za-z]+)\s*</guess>")
_BARE = re.compile(r"\s*([A-Za-z]+)[.!]?\s*")


class WordleConfig(ToolEnvironmentConfig):
    """Number of guesses and partial rewards."""

    max_turns: int = Field(6, ge=1)
    """Maximum number of guesses; a message without a guess counts too."""
    max_tool_calls: int = Field(0, ge=0, le=0)
    """Always 0: there are no tools."""
    partial_credit: float = Field(0.2, ge=0.0, lt=1.0)
    """Reward for a best guess with 4 of 5 letters in place; fewer earn proportionally less. The word gives 1."""


def score(env: Wordle) -> float:
    """1 for the word; otherwise a share of `partial_credit` for the letters in place in the best guess."""
    word = env.current_task.data["answer"]
    in_place = max((marks(guess, word).count("G") for guess in env.tried), default=0)
    return 1.0 if word in env.tried else env.config.partial_credit * in_place / (LENGTH - 1)


def solved(env: Wordle) -> float:
    """1 if the word was found; otherwise 0."""
    return float(env.current_task.data["answer"] in env.tried)


def guesses(env: Wordle) -> float:
    """Number of valid guesses."""
    return float(len(env.tried))


class Wordle(fe.ToolEnvironment):
    """Find a word of five letters in six guesses; each is answered letter by letter."""

    api_version = 1
    config_class = WordleConfig
    system_prompt = (
        "You look for an English word of five letters. Write each guess as <guess>house</guess>. The answer has a mark "
        "for each letter: G right and in its place, Y in the word but elsewhere, - not in the word (or not that often)."
    )
    config: WordleConfig
    tried: list[str]
    rubric = fe.Rubric([score], metrics=[solved, guesses])

    def task(self, split: str, index: int) -> Task:
        """Return a word of `split`: all words in an order drawn by seed, then all again in another order."""
        words = words_of(split)
        rounds, position = divmod(index, len(words))
        order = Random(f"wordle/{self.config.seed}/{split}/{rounds}").sample(range(len(words)), len(words))
        word = words[order[position]]
        return Task(
            id=f"{split}-{self.config.seed}-{index}",
            prompt=f"Find the word. You have {self.config.max_turns} guesses.",
            data={"answer": word},
            gold=f"<guess>{word}</guess>",
            difficulty=1 if len(set(word)) == LENGTH else 2,
            split=split,
        )

    async def setup(self, task: Task) -> None:
        """Clear the guesses."""
        self.tried = []

    def is_final(self, message: Message) -> bool:
        """Always False: finding the word ends the game, or the last guess."""
        return False

    async def respond(self, message: Message) -> Observation:
        """The marks of the guess, or the reason why it is invalid."""
        word = self.current_task.data["answer"]
        left = self.config.max_turns - self.turns
        guess = guess_of(message.content)
        if guess is None:
            notice = f"That is not a guess: write one English word of {LENGTH} letters as <guess>house</guess>."
        elif len(guess) != LENGTH:
            notice = f"{guess[:20]} has {len(guess)} letters; the word has {LENGTH}."
        else:
            self.tried.append(guess)
            if guess == word:
                self.submit(guess)
                return []
            notice = f"{guess}\n{marks(guess, word)}"
        return [Message(role="user", content=f"{notice}\n{left} guesses left.")]


def guess_of(text: str) -> str | None:
    """The last tagged word of a message, or an untagged message that is only a word; None if neither."""
    if tagged := _TAGGED.findall(text):
        return str(tagged[-1]).lower()
    bare = _BARE.fullmatch(text)
    return bare.group(1).lower() if bare else None


def marks(guess: str, word: str) -> str:
    """One mark per letter. A letter gets at most as many Y marks as the word has occurrences of it not marked G."""
    left = Counter(letter for letter, given in zip(word, guess, strict=True) if letter != given)
    result = ""
    for letter, given in zip(word, guess, strict=True):
        if letter == given:
            result += "G"
        elif left[given] > 0:
            left[given] -= 1
            result += "Y"
        else:
            result += "-"
    return result
