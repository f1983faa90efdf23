"""Names, cities, jobs and sentences. Those of `eval` are in no other split; sentences are shared."""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


NAMES = {
    "train": _words(
        "Aaron Agnes Alan Alma Bruno Carla Cecil Diana Edgar Elsa Fiona Gavin Greta Harold Ingrid Ivan Jonas "
        "Judith Kevin Laura Leo Marta Monica Nina Olga Peter Quentin Rosa Simon Tessa Ulrich Viola Walter "
        "Yvonne"
    ),
    "eval": _words("Albert Bianca Conrad Doris Eric Flora Gustav Helen Igor Julia Kurt Lydia Martin Norma"),
}
CITIES = {
    "train": _words(
        "Amsterdam Ankara Berlin Boston Brussels Cairo Chicago Delhi Dublin Glasgow Hamburg Kyoto London "
        "Madrid Moscow Naples Oslo Paris Prague Rome Seattle Sydney Vienna Warsaw"
    ),
    "eval": _words("Athens Bergen Denver Geneva Houston Lisbon Milan Toronto Turin Zurich"),
}
JOBS = {
    "train": _words(
        "baker banker builder chemist clerk dentist farmer lawyer mechanic nurse painter pilot plumber singer "
        "teacher waiter writer"
    ),
    "eval": _words("carpenter doctor driver gardener judge poet sailor tailor"),
}
FORMS = {
    1: (
        "{name} is {age} years old, lives in {city} and works as a {job}.",
        "{name}, {age}, of {city}, is a {job}.",
        "Meet {name}, {age}, who lives in {city} and is a {job}.",
    ),
    2: (
        "{name}, a {age}-year-old {job}, lives in {city}.",
        "The {job} {name} from {city} is {age}.",
        "In {city} lives a {job} called {name}, who is {age} years old.",
        "At the age of {age}, {name} still works as a {job} in {city}.",
    ),
    3: (
        "{another} met {name}, a {job} of {age} years, in {city}.",
        "{name} from {city} is {age}, {later} years older than {another}, and works as a {job}.",
        "The {job} {name} lives in {city} with {another} and is {age} years old.",
    ),
}
"""Sentences by level."""
