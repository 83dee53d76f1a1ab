"""Lexicons (word lists) for generated conversations. Add words only at the end of a list."""

from typing import NamedTuple

from specbench_cli.training.generated.template import Draw

NAMES = (
    "Anna Ben Clara David Ella Felix Grace Henry Ida Jonas Kate Leo Mia Noah Olga Paul "
    "Rosa Simon Tina Victor Wendy Zoe Adam Lena"
).split()
SURNAMES = (
    "Brook Carter Dale Ellis Fisher Grant Hale Irving Keller Lane Marsh Norton Price Quinn "
    "Reed Stone Turner Vance Walker Young"
).split()
TOWNS = (
    "Halden Brimley Corvin Dunmore Eastwick Farley Granton Holbrook Kelmore Linford Marlow "
    "Northam Oakridge Penrose Redhill Selby Thornton Upwell Wexford Yarrow"
).split()
COMPANIES = (
    "Altera Borealis Cobalt Dynamo Equinox Fernway Goldleaf Harbor Ironwood Juniper Kestrel "
    "Lumen Meridian Northstar Orchard Pinnacle"
).split()
TEAMS = (
    "Lions Hawks Rovers Wolves Comets Sharks Eagles Bears Tigers Foxes Ravens Bulls Storks "
    "Panthers Otters Falcons"
).split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday".split()
ITEMS = (
    "apples pencils books marbles stickers oranges cookies candles stamps shells cards balloons "
    "muffins eggs flowers bottles buttons peaches"
).split()
BUILDINGS = (
    "library,school,bridge,hospital,theater,train station,swimming pool,town hall,market hall,"
    "fire station,sports center,museum,harbor,bus depot"
).split(",")
PRODUCTS = (
    "phone,bicycle,camera,heater,printer,lamp,tractor,watch,speaker,battery,drone,oven,"
    "keyboard,scooter"
).split(",")
BENEFITS = (
    "saves energy,weighs much less,is easy to repair,works in the rain,makes no noise,"
    "lasts twice as long,costs less to build,is safe for children"
).split(",")
REASONS = (
    "the old one was too small,many families had asked for it,the region is growing fast,"
    "visitors had complained for years,the roof of the old one was leaking,"
    "safety rules had changed,the mayor had promised it,prices had fallen"
).split(",")
WEATHER = (
    "strong winds,heavy rain,thick snow,a sudden flood,large hailstones,a long thunderstorm,"
    "freezing fog,high waves"
).split(",")
PLACES = "beach,forest,mountains,desert,city,lake,island,village,river,farm,castle,jungle".split(
    ","
)
GEAR = (
    "a map,a warm jacket,sunglasses,a bottle of water,a small tent,a camera,good boots,"
    "a first-aid kit,a flashlight,some fruit,a notebook,a rope,a blanket,an umbrella,"
    "a pocket knife,a towel"
).split(",")
JOBS = (
    "baker,pilot,gardener,teacher,sailor,doctor,painter,farmer,singer,carpenter,nurse,"
    "detective,cook,librarian,astronomer,fisherman"
).split(",")
TRAITS = (
    "patient,curious,brave,careful,cheerful,quiet,honest,clever,gentle,stubborn,generous,proud"
).split(",")
HOBBIES = (
    "chess,swimming,old films,photography,jazz,hiking,poetry,cooking,astronomy,cycling,"
    "pottery,birdwatching,dancing,model trains"
).split(",")
EVENTS = (
    "birthday party,concert,book club,picnic,dance evening,chess tournament,art show,"
    "garden party,film night,cooking class"
).split(",")
EXHIBITS = (
    "clocks,maps,masks,coins,paintings,kites,swords,carpets,toys,ships,violins,fossils"
).split(",")
MATERIALS = "stone,steel,oak,brick,iron,granite,concrete,marble".split(",")
COLOR_NAMES = "red,green,blue,white,black,yellow,brown,gray".split(",")
FESTIVAL_THINGS = (
    "lanterns,cheese,boats,puppets,cherries,drums,horses,soup,roses,kites,bread,fireworks"
).split(",")


class Scenery(NamedTuple):
    """Subject of a line of a poem, with its verb."""

    thing: str
    does: str


SCENERY = [
    Scenery(*entry.split("/"))
    for entry in (
        "the wind/sings to,the moon/watches over,a distant bell/calls,the tall grass/whispers to,"
        "a small boat/waits for,the morning sun/shines on,an owl/listens to,"
        "the cold river/follows,a silver cloud/hides from,the old tree/dreams of,"
        "a lonely road/leads to,the first snow/covers"
    ).split(",")
]


class Action(NamedTuple):
    """Event of a story, in the present and in the past tense."""

    present: str
    past: str


ACTIONS = [
    Action(*pair.split("/"))
    for pair in (
        "finds an old key/found an old key,opens a hidden door/opened a hidden door,"
        "meets a friendly dog/met a friendly dog,climbs a steep hill/climbed a steep hill,"
        "reads a strange letter/read a strange letter,loses a red scarf/lost a red scarf,"
        "hears a soft voice/heard a soft voice,builds a wooden raft/built a wooden raft,"
        "crosses a narrow bridge/crossed a narrow bridge,sees a bright light/saw a bright light,"
        "follows a white cat/followed a white cat,writes a long song/wrote a long song,"
        "buys a silver ring/bought a silver ring,draws a secret map/drew a secret map,"
        "bakes a cherry pie/baked a cherry pie,takes the last train/took the last train"
    ).split(",")
]


def person(d: Draw) -> str:
    """Return a first name and a surname."""
    return f"{d.word(NAMES)} {d.word(SURNAMES)}"
