"""Names, cities, jobs and sentences. Those of `eval` are in no other split; sentences are shared."""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


NAMES = {
    "train": _words(
        "Aaron Agnes Alan Alice Alma Anna Arthur Barbara Boris Bruno Carla Carol Cecil Clara Daniel Diana Edgar Elena "
        "Elsa Emma Felix Fiona Frank Gavin George Greta Harold Henry Hugo Ida Ingrid Irene Ivan Jacob Jonas Judith "
        "Karl Kevin Laura Leo Linda Lucas Maria Marta Max Monica Nina Oliver Olga Oscar Paula Peter Quentin Ralph "
        "Rita Robert Rosa Ruth Sara Simon Stella Tessa Thomas Ulrich Vera Victor Viola Walter Yvonne Zoe"
    ),
    "eval": _words("Albert Bianca Conrad Doris Eric Flora Gustav Helen Igor Julia Kurt Lydia Martin Norma"),
}
CITIES = {
    "train": _words(
        "Aberdeen Adelaide Amsterdam Ankara Antwerp Atlanta Auckland Baghdad Baltimore Bangkok Barcelona Basel Beirut "
        "Belfast Belgrade Berlin Birmingham Bologna Bombay Boston Bristol Brussels Budapest Cairo Calgary Cardiff "
        "Chicago Cologne Copenhagen Dallas Damascus Delhi Detroit Dresden Dublin Edinburgh Florence Frankfurt Genoa "
        "Ghent Glasgow Hamburg Hanover Havana Helsinki Istanbul Jakarta Kyoto Leeds Leipzig Lima Liverpool London "
        "Lyon Madrid Manchester Manila Marseille Melbourne Memphis Mexico Miami Montreal Moscow Munich Nairobi "
        "Naples Osaka Oslo Ottawa Palermo Paris Perth Phoenix Porto Prague Quebec Rome Rotterdam Salzburg Santiago "
        "Seattle Seoul Seville Shanghai Sofia Stockholm Stuttgart Sydney Tampa Tokyo Utrecht Valencia Vancouver "
        "Venice Verona Vienna Warsaw Zagreb"
    ),
    "eval": _words("Athens Bergen Denver Geneva Houston Lisbon Milan Toronto Turin Zurich"),
}
JOBS = {
    "train": _words(
        "baker banker barber biologist bookseller brewer builder butcher captain cashier chef "
        "chemist clerk coach composer dancer dentist designer detective diver "
        "farmer firefighter fisherman florist geologist hunter jeweller journalist lawyer librarian locksmith manager "
        "mechanic merchant miller miner musician novelist nurse painter pharmacist photographer physicist "
        "pianist pilot plumber porter potter printer programmer roofer sculptor secretary shepherd singer soldier "
        "student surgeon surveyor teacher translator trumpeter waiter weaver welder writer zoologist"
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
