"""A shop's database, drawn by seed: customers, products, orders and their lines."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from datetime import date, timedelta
from functools import lru_cache
from random import Random

CITIES = ("Athens", "Bergen", "Cadiz", "Dublin", "Espoo", "Ghent", "Lyon", "Porto", "Turin", "Vienna")
CATEGORIES = ("books", "garden", "kitchen", "music", "sports", "toys")
THINGS = (
    *("Anchor", "Basket", "Candle", "Drum", "Easel", "Flute", "Globe", "Hammer", "Inkwell", "Jigsaw", "Kettle", "Lamp"),
    *("Mug", "Notebook", "Oar", "Pan", "Quilt", "Racket", "Saw", "Tent", "Urn", "Vase", "Whisk", "Yoyo"),
)
NAMES = (
    *("Alva", "Bram", "Chloe", "Dario", "Edda", "Finn", "Gaia", "Henk", "Ilse", "Joris", "Kaia", "Luca", "Maja"),
    *("Nils", "Oona", "Pavel", "Rosa", "Sven", "Tilda", "Ugo", "Vera", "Willem", "Xenia", "Yara", "Zoe"),
)
FIRST_DAY = date(2024, 1, 1)
SCHEMA = """\
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT, joined TEXT);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT, category TEXT, price_cents INTEGER);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER, day TEXT, cancelled INTEGER);
CREATE TABLE lines (order_id INTEGER, product_id INTEGER, amount INTEGER);
"""


@dataclass(frozen=True, slots=True)
class Customer:
    """One row of `customers`."""

    id: int
    name: str
    city: str
    joined: str


@dataclass(frozen=True, slots=True)
class Product:
    """One row of `products`."""

    id: int
    name: str
    category: str
    price_cents: int


@dataclass(frozen=True, slots=True)
class Order:
    """One row of `orders`, with its rows of `lines` as `(product_id, amount)`."""

    id: int
    customer_id: int
    day: str
    cancelled: int
    lines: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Shop:
    """All rows of the database."""

    customers: tuple[Customer, ...]
    products: tuple[Product, ...]
    orders: tuple[Order, ...]

    def database(self) -> bytes:
        """The rows as an SQLite database file."""
        connection = sqlite3.connect(":memory:")
        try:
            connection.executescript(SCHEMA)
            people = [(c.id, c.name, c.city, c.joined) for c in self.customers]
            connection.executemany("INSERT INTO customers VALUES (?, ?, ?, ?)", people)
            things = [(p.id, p.name, p.category, p.price_cents) for p in self.products]
            connection.executemany("INSERT INTO products VALUES (?, ?, ?, ?)", things)
            orders = [(o.id, o.customer_id, o.day, o.cancelled) for o in self.orders]
            connection.executemany("INSERT INTO orders VALUES (?, ?, ?, ?)", orders)
            lines = [(o.id, *line) for o in self.orders for line in o.lines]
            connection.executemany("INSERT INTO lines VALUES (?, ?, ?)", lines)
            connection.commit()
            return connection.serialize()
        finally:
            connection.close()

    def spent(self, order: Order) -> int:
        """Total price of an order in cents."""
        prices = {product.id: product.price_cents for product in self.products}
        return sum(prices[product] * amount for product, amount in order.lines)


def _day(rng: Random) -> str:
    return (FIRST_DAY + timedelta(days=rng.randrange(366))).isoformat()


@lru_cache(maxsize=64)
def draw_shop(seed: str) -> Shop:
    """Draw the shop of a seed."""
    rng = Random(seed)
    customers = tuple(
        Customer(number, name, rng.choice(CITIES), _day(rng))
        for number, name in enumerate(rng.sample(NAMES, rng.randint(12, len(NAMES))), start=1)
    )
    products = tuple(
        Product(number, name, rng.choice(CATEGORIES), rng.randint(2, 120) * 50)
        for number, name in enumerate(rng.sample(THINGS, rng.randint(10, len(THINGS))), start=1)
    )
    orders = tuple(
        Order(
            number,
            rng.choice(customers[: len(customers) * 4 // 5]).id,  # some customers have never ordered
            _day(rng),
            int(rng.random() < 0.15),
            tuple((product.id, rng.randint(1, 5)) for product in rng.sample(products, rng.randint(1, 4))),
        )
        for number in range(1, rng.randint(80, 200))
    )
    return Shop(customers, products, orders)
