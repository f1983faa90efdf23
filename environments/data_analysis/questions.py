"""Kinds of questions. Each computes its answer from the rows in Python and provides an SQL query that returns it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from random import Random

from environments.data_analysis.shop import CATEGORIES, Shop
from environments.sql.questions import only_highest

EUROS = "Give the amount in euros."


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its answer (a number or a name as text), and a query whose only value is the answer."""

    text: str
    answer: str
    query: str
    difficulty: int


Kind = Callable[[Random, Shop], Question | None]


def _euros(cents: int) -> str:
    return f"{cents / 100:.2f}"


def customers_of_city(rng: Random, shop: Shop) -> Question | None:
    """A count with one condition."""
    city = rng.choice(shop.customers).city
    count = sum(customer.city == city for customer in shop.customers)
    query = f"SELECT COUNT(*) FROM customers WHERE city = '{city}'"
    return Question(f"How many customers live in {city}?", str(count), query, 1)


def dearest_product(rng: Random, shop: Shop) -> Question | None:
    """The maximum of a category."""
    category = rng.choice(CATEGORIES)
    prices = Counter({product.name: product.price_cents for product in shop.products if product.category == category})
    if (name := only_highest(prices)) is None:
        return None
    query = f"SELECT name FROM products WHERE category = '{category}' ORDER BY price_cents DESC LIMIT 1"
    return Question(f"What is the name of the most expensive product of the category {category}?", name, query, 1)


def orders_of_month(rng: Random, shop: Shop) -> Question | None:
    """A count over a range of dates."""
    month = f"2024-{rng.randint(1, 12):02}"
    count = sum(order.day.startswith(month) and not order.cancelled for order in shop.orders)
    query = f"SELECT COUNT(*) FROM orders WHERE day LIKE '{month}-%' AND cancelled = 0"
    return Question(f"How many orders of the month {month} were not cancelled?", str(count), query, 1)


def revenue_of_category(rng: Random, shop: Shop) -> Question | None:
    """A sum over three tables."""
    category = rng.choice(CATEGORIES)
    of_category = {product.id: product.price_cents for product in shop.products if product.category == category}
    cents = sum(
        of_category.get(product, 0) * amount
        for order in shop.orders
        if not order.cancelled
        for product, amount in order.lines
    )
    query = (
        "SELECT COALESCE(SUM(l.amount * p.price_cents), 0) / 100.0 FROM lines l JOIN products p ON p.id = l.product_id "
        f"JOIN orders o ON o.id = l.order_id WHERE p.category = '{category}' AND o.cancelled = 0"
    )
    text = f"What did products of the category {category} bring in altogether, cancelled orders left out? {EUROS}"
    return Question(text, _euros(cents), query, 2)


def best_customer(rng: Random, shop: Shop) -> Question | None:
    """The key with the largest sum over four tables."""
    names = {customer.id: customer.name for customer in shop.customers}
    spent: Counter[str] = Counter()
    for order in shop.orders:
        if not order.cancelled:
            spent[names[order.customer_id]] += shop.spent(order)
    if (name := only_highest(spent)) is None:
        return None
    query = (
        "SELECT c.name FROM customers c JOIN orders o ON o.customer_id = c.id JOIN lines l ON l.order_id = o.id "
        "JOIN products p ON p.id = l.product_id WHERE o.cancelled = 0 GROUP BY c.id "
        "ORDER BY SUM(l.amount * p.price_cents) DESC LIMIT 1"
    )
    return Question("Which customer spent the most, cancelled orders left out?", name, query, 2)


def never_ordered(rng: Random, shop: Shop) -> Question | None:
    """A count of rows without a matching row in another table."""
    ordered = {order.customer_id for order in shop.orders}
    count = sum(customer.id not in ordered for customer in shop.customers)
    query = "SELECT COUNT(*) FROM customers WHERE id NOT IN (SELECT customer_id FROM orders)"
    return Question("How many customers have never ordered anything, not even an order they cancelled?",
                    str(count), query, 2)  # fmt: skip


def average_order(rng: Random, shop: Shop) -> Question | None:
    """A mean of sums."""
    city = rng.choice(shop.customers).city
    living = {customer.id for customer in shop.customers if customer.city == city}
    sums = [shop.spent(order) for order in shop.orders if order.customer_id in living and not order.cancelled]
    if not sums or 2 * sum(sums) % len(sums) == 0 != sum(sums) % len(sums):
        return None  # half a cent is rounded in more than one way
    query = (
        "SELECT AVG(total) / 100.0 FROM (SELECT SUM(l.amount * p.price_cents) AS total FROM orders o "
        "JOIN lines l ON l.order_id = o.id JOIN products p ON p.id = l.product_id "
        f"JOIN customers c ON c.id = o.customer_id WHERE o.cancelled = 0 AND c.city = '{city}' GROUP BY o.id)"
    )
    text = f"What is the average price of an order by customers from {city}, cancelled orders left out? {EUROS}"
    return Question(text, _euros(round(sum(sums) / len(sums))), query, 3)


def favourite_category(rng: Random, shop: Shop) -> Question | None:
    """The mode of one customer's purchases."""
    customer = rng.choice(shop.customers)
    categories = {product.id: product.category for product in shop.products}
    pieces: Counter[str] = Counter()
    for order in shop.orders:
        if order.customer_id == customer.id:
            for product, amount in order.lines:
                pieces[categories[product]] += amount
    if (category := only_highest(pieces)) is None:
        return None
    query = (
        "SELECT p.category FROM lines l JOIN orders o ON o.id = l.order_id JOIN products p ON p.id = l.product_id "
        f"WHERE o.customer_id = {customer.id} GROUP BY p.category ORDER BY SUM(l.amount) DESC LIMIT 1"
    )
    text = f"Of which category did the customer {customer.name} order the most pieces, cancelled orders included?"
    return Question(text, category, query, 3)


def longest_gap(rng: Random, shop: Shop) -> Question | None:
    """A difference between neighbouring rows, easier in Python than in SQL."""
    days = sorted({date.fromisoformat(order.day) for order in shop.orders})
    gap = max((later - earlier).days for earlier, later in pairwise(days))
    query = (
        "SELECT CAST(MAX(gap) AS INTEGER) FROM (SELECT JULIANDAY(day) - JULIANDAY(LAG(day) OVER (ORDER BY day)) AS gap "
        "FROM (SELECT DISTINCT day FROM orders))"
    )
    text = "What is the largest number of days between two successive days with orders, cancelled ones included?"
    return Question(text, str(gap), query, 4)


KINDS: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (
        customers_of_city,
        dearest_product,
        orders_of_month,
        revenue_of_category,
        best_customer,
        never_ordered,
        average_order,
        favourite_category,
        longest_gap,
    )
}
