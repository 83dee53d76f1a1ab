"""Invented countries and their facts, which the models learn by heart in training."""

import random
from typing import NamedTuple


class Country(NamedTuple):
    """Invented country and its facts.

    Each capital is unique. Two countries share each other fact.
    """

    name: str
    capital: str
    river: str
    food: str
    animal: str
    trade: str


COUNTRY_STEMS = (
    "Arvan Borv Caldor Drusl Estov Felm Gald Hamor Ilvar Jorl Kestr Lusan Morav Nord Orsin Pelag "
    "Quint Roven Silv Tarsov Umbr Valdor Wendl Zelm"
).split()
COUNTRY_ENDINGS = "ia mark".split()
CAPITAL_STEMS = (
    "Bel Cas Dor El Fen Gor Hes Is Jor Kal Lom Mor Nes Os Pel Quor Ros Sar Tor Ul Val Wes Xan Yor"
).split()
CAPITAL_ENDINGS = "mar wick".split()
RIVERS = (
    "Tarn Ulm Senna Oster Lorne Varda Mirel Quill Dane Bresk Ivel Prell Rhone Saven Teme Usk Wye "
    "Yarra Alder Birk Cray Dell Esk Fenn"
).split()
FOODS = (
    "honey bread,fish soup,plum cake,bean stew,goat cheese,onion pie,apple dumplings,lamb curry,"
    "corn pancakes,rice pudding,smoked trout,lentil salad,garlic soup,berry jam,roast duck,"
    "sweet potatoes,nut bread,pepper stew,mushroom pie,lemon rice,cabbage rolls,crab cakes,"
    "rye bread,grilled squid"
).split(",")
ANIMALS = (
    "gray wolf,white stork,brown bear,red fox,golden eagle,river otter,wild horse,black swan,"
    "snow owl,mountain goat,green turtle,blue heron,sea lion,giant elk,striped cat,silver fish,"
    "forest deer,wild boar,spotted lynx,desert camel,stone marten,gray seal,barn owl,coral snake"
).split(",")
GOODS = (
    "copper timber salt wool glass coal silk tea iron paper spices wine silver ships leather "
    "pearls rubber marble furniture dates clocks oil butter sugar"
).split()


def _make_world() -> list[Country]:
    """Return the countries, with facts assigned in a seeded random order."""
    rng = random.Random("the world")
    names = [stem + ending for stem in COUNTRY_STEMS for ending in COUNTRY_ENDINGS]
    capitals = [stem + ending for stem in CAPITAL_STEMS for ending in CAPITAL_ENDINGS]
    shared = [words * len(COUNTRY_ENDINGS) for words in (RIVERS, FOODS, ANIMALS, GOODS)]
    columns = [names, capitals, *shared]
    for column in columns:
        rng.shuffle(column)
    return [Country(*facts) for facts in zip(*columns, strict=True)]


WORLD = _make_world()
