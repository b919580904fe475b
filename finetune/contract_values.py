"""Names and values for generated contracts, dealt out so that no two splits share one."""

import random
from collections.abc import Callable, Sequence
from functools import cache

SPLITS = ("train", "validation", "test")
# Out of 20 values, validation and test get 3 each.
_SHARES = {"train": range(14), "validation": range(14, 17), "test": range(17, 20)}


def _words(text: str) -> list[str]:
    return text.split()


_FIRST_NAMES = _words(
    "Ada Agnes Albert Amelia Anton Arthur Beatrice Bernard Boris Camilla Carl Cecilia Clara Conrad Dora Edgar Edith "
    "Elias Emil Esther Eva Felix Flora Frank Georg Greta Hanna Harold Hector Helen Hugo Ida Igor Irene Ivan Jakob Joan "
    "Julia Karin Konrad Laura Leo Linda Lucas Mabel Magda Martin Nadia Nora Oscar Otto Paula Peter Rosa Ruth Selma "
    "Simon Sonja Theo Ursula Victor Walter Wanda Xenia"
)
_LAST_NAMES = _words(
    "Abbott Adler Almond Archer Barlow Becker Bishop Borg Brandt Bright Calder Carver Castle Cooper Dalton Dietz Drake "
    "Ekman Elliot Ember Falk Fenton Fischer Foster Garner Gibson Glover Haller Hansen Harding Hobbs Ibsen Irving "
    "Jansen Keller Kern Lambert Larsen Lindt Marlow Mercer Moran Nash Norton Olsen Osborn Palmer Parker Quist "
    "Ramsey Reuter Sadler Sander Sharp Thorne Tilly Ulrich Vance Vogel Walden Weber Wolfe York Zander"
)
_TOWN_BEGINNINGS = _words(
    "Alder Amber Ash Barn Birch Black Bridge Bright Brook Clay Cliff Cold Crow Deep East Elm Fair Fern Fox Glen Gold "
    "Green Hart Haw High Holl Iron King Lang Lime Maple Marl Mill Moor New North Oak Old Penn Raven Red Rock Rose Salt "
    "Silver South Stone Summer Thorn West White Wild Winter Wood"
)
_TOWN_ENDINGS = _words(
    "bridge burn bury by dale field ford gate ham haven hurst leigh mere mouth port stead ton well wick"
)
_TRADES = _words(
    "Bank Brothers Capital Chemicals Energy Foods Freight Glass Group Holdings Industries Instruments Logistics "
    "Machinery Marine Metals Motors Optics Packaging Paper Partners Systems Textiles Timber Trading Works"
)
_MONTHS = _words("January February March April May June July August September October November December")


def _towns() -> list[str]:
    return [beginning + ending for beginning in _TOWN_BEGINNINGS for ending in _TOWN_ENDINGS]


def _dates() -> list[str]:
    return [f"{day} {month} {year}" for year in range(2001, 2031) for month in _MONTHS for day in range(1, 29)]


# Everything there is of a sort; `values_of_split` deals it out.
_ALL: dict[str, Callable[[], Sequence[str]]] = {
    "days": lambda: [f"{n} days" for n in range(5, 186)],
    "months": lambda: [f"{n} months" for n in range(3, 100)],
    "hours": lambda: [f"{n} hours" for n in range(3, 100)],
    "amount": lambda: [f"{n:,} euros" for n in range(1_500, 100_000, 50)],
    "percent": lambda: [f"{n / 100:.2f} percent" for n in range(105, 1_400, 5)],
    "date": _dates,
    "town": _towns,
    "last name": lambda: _LAST_NAMES,
}


@cache
def values_of_split(sort: str, split: str) -> tuple[str, ...]:
    """The values of a sort that belong to a split and to no other; persons and companies share no name either."""
    if sort == "person":
        return tuple(f"{first} {last}" for first in _FIRST_NAMES for last in values_of_split("last name", split))
    if sort == "company":
        return tuple(f"{town} {trade}" for town in values_of_split("town", split) for trade in _TRADES)
    values = list(_ALL[sort]())
    random.Random(f"deal out {sort}").shuffle(values)
    return tuple(value for place, value in enumerate(values) if place % 20 in _SHARES[split])
