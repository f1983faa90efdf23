"""Names, cities, jobs and sentences. Every fifth word is only in the split `unseen`; all splits share sentences."""

from __future__ import annotations


def _split(text: str) -> dict[str, list[str]]:
    """Return the words by part: in alphabetical order, every fifth is `unseen`, the others are `seen`."""
    words = sorted(text.split())
    unseen = words[4::5]
    return {"seen": [word for word in words if word not in unseen], "unseen": unseen}


NAMES = _split(
    "Aaron Agnes Alan Albert Alice Alma Anna Arthur Barbara Bianca Boris Bruno Carla Carol Cecil Clara Conrad Daniel "
    "Diana Doris Edgar Elena Elsa Emma Eric Felix Fiona Flora Frank Gavin George Greta Gustav Harold Helen Henry Hugo "
    "Ida Igor Ingrid Irene Ivan Jacob Jonas Judith Julia Karl Kevin Kurt Laura Leo Linda Lucas Lydia Maria Marta "
    "Martin Max Monica Nina Norma Olga Oliver Oscar Paula Peter Quentin Ralph Rita Robert Rosa Ruth Sara Simon Stella "
    "Tessa Thomas Ulrich Vera Victor Viola Walter Yvonne Zoe"
)
CITIES = _split(
    "Aberdeen Amsterdam Ankara Athens Atlanta Baghdad Baltimore Barcelona Basel Belfast Belgrade Berlin Birmingham "
    "Bombay Boston Brussels Budapest Calgary Cardiff Cologne Copenhagen Damascus Delhi Detroit Dresden Edinburgh "
    "Florence Geneva Genoa Glasgow Hamburg Havana Helsinki Istanbul Jakarta Leeds Leipzig Lisbon Liverpool Lyon "
    "Madrid Manila Marseille Memphis Mexico Milan Montreal Munich Nairobi Osaka Oslo Palermo Paris Phoenix Porto "
    "Quebec Rome Salzburg Santiago Seoul Seville Sofia Stockholm Sydney Tampa Toronto Turin Valencia Vancouver Verona "
    "Vienna Zagreb Zurich"
)
JOBS = _split(
    "baker barber biologist brewer builder captain carpenter chef chemist coach composer dentist designer diver "
    "doctor farmer firefighter florist gardener hunter jeweller judge lawyer locksmith manager merchant miller "
    "musician novelist painter pharmacist physicist pianist plumber poet potter printer roofer sailor secretary "
    "shepherd soldier student surveyor tailor translator trumpeter weaver welder zoologist"
)
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
