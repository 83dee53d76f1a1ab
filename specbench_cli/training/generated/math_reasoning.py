"""Math word problems with step-by-step answers that end in `#### N`, as in GSM8K."""

from specbench_cli.training.generated.lexicon import ITEMS, NAMES, PRODUCTS
from specbench_cli.training.generated.template import Draw, FilledTemplate, skill, with_article

TIMES = (("twice", 2), ("three times", 3), ("four times", 4))


@skill(
    "math_reasoning",
    "sum",
    "{name} buys {a} {first} for ${p} each and {b} {second} for ${q} each. "
    "How much does {name} pay in total?",
    "{name} goes to the shop. {name} takes {a} {first} at ${p} each and {b} {second} at ${q} each. "
    "What does {name} pay altogether?",
    "At the market {first} cost ${p} each and {second} cost ${q} each. {name} buys {a} {first} "
    "and {b} {second}. How many dollars does {name} pay?",
)
def purchase(d: Draw) -> FilledTemplate:
    """Ask for the total price of two purchases."""
    name, (first, second) = d.word(NAMES), d.words(ITEMS, 2)
    a, p, b, q = (d.number(2, 9) for _ in range(4))
    return FilledTemplate(
        {"name": name, "first": first, "second": second, "a": a, "p": p, "b": b, "q": q},
        [
            f"The {first} cost {a}*{p} = ${a * p}.\nThe {second} cost {b}*{q} = ${b * q}.\n"
            f"In total {name} pays {a * p}+{b * q} = ${a * p + b * q}.\n#### {a * p + b * q}"
        ],
    )


@skill(
    "math_reasoning",
    "difference",
    "{name} has ${money} and buys {a} {item} for ${p} each. How much money does {name} have left?",
    "{name} goes to the market with ${money} and pays for {a} {item} at ${p} each. "
    "How many dollars are left to {name}?",
    "{item} cost ${p} each. {name} takes {a} of them and pays with ${money}. "
    "How much change does {name} get?",
)
def change(d: Draw) -> FilledTemplate:
    """Ask for the money left after a purchase."""
    name, item, a, p = d.word(NAMES), d.word(ITEMS), d.number(2, 9), d.number(2, 9)
    money = a * p + d.number(1, 30)
    left = money - a * p
    return FilledTemplate(
        {"name": name, "item": item, "a": a, "p": p, "money": money},
        [
            f"The {item} cost {a}*{p} = ${a * p}.\n{name} has {money}-{a * p} = ${left} left.\n"
            f"#### {left}"
        ],
    )


@skill(
    "math_reasoning",
    "difference",
    "{name} has {n} {item}. {name} gives {a} {item} to {friend} and {b} {item} to {other}. "
    "How many {item} does {name} keep?",
    "{name} had {n} {item} this morning. {friend} got {a} of the {item} and {other} got {b}. "
    "How many {item} are left to {name}?",
    "From {n} {item} {name} hands out {a} to {friend} and then {b} to {other}. "
    "How many {item} remain?",
)
def give_away(d: Draw) -> FilledTemplate:
    """Ask for the number of things left after two gifts."""
    name, friend, other = d.words(NAMES, 3)
    item, a, b = d.word(ITEMS), d.number(2, 15), d.number(2, 15)
    n = a + b + d.number(1, 20)
    return FilledTemplate(
        {"name": name, "friend": friend, "other": other, "item": item, "a": a, "b": b, "n": n},
        [
            f"{name} gives away {a}+{b} = {a + b} {item}.\n{name} keeps {n}-{a + b} = {n - a - b} "
            f"{item}.\n#### {n - a - b}"
        ],
    )


@skill(
    "math_reasoning",
    "multiple",
    "{friend} has {n} {item}. {name} has {times} as many {item} as {friend}. "
    "How many {item} do they have together?",
    "{name} collects {item} and has {times} as many as {friend}, who has {n}. "
    "How many {item} do the two have altogether?",
    "There are {n} {item} in the bag of {friend}. In the bag of {name} there are {times} as many. "
    "How many {item} are there in both bags?",
)
def together(d: Draw) -> FilledTemplate:
    """Ask for the sum of a number and a multiple of this number."""
    (name, friend), item, n = d.words(NAMES, 2), d.word(ITEMS), d.number(3, 12)
    times, factor = d.rng.choice(TIMES)
    total = n * factor + n
    return FilledTemplate(
        {"name": name, "friend": friend, "item": item, "n": n, "times": times},
        [
            f"{name} has {n}*{factor} = {n * factor} {item}.\nTogether they have "
            f"{n * factor}+{n} = {total} {item}.\n#### {total}"
        ],
    )


@skill(
    "math_reasoning",
    "multiple",
    "{friend} has {n} {item}. {name} has {times} as many {item} as {friend}. "
    "How many more {item} does {name} have?",
    "{name} collects {item} and has {times} as many as {friend}, who has {n}. "
    "By how many {item} is {name} ahead?",
    "There are {n} {item} in the bag of {friend}. In the bag of {name} there are {times} as many. "
    "How many more {item} are there in the bag of {name}?",
)
def more(d: Draw) -> FilledTemplate:
    """Ask for the difference between a number and a multiple of this number."""
    (name, friend), item, n = d.words(NAMES, 2), d.word(ITEMS), d.number(3, 12)
    times, factor = d.rng.choice(TIMES)
    ahead = n * factor - n
    return FilledTemplate(
        {"name": name, "friend": friend, "item": item, "n": n, "times": times},
        [
            f"{name} has {n}*{factor} = {n * factor} {item}.\n"
            f"{name} has {n * factor}-{n} = {ahead} {item} more.\n#### {ahead}"
        ],
    )


@skill(
    "math_reasoning",
    "boxes",
    "{name} packs {k} boxes with {m} {item} each. Later {lost} {item} are lost. "
    "How many {item} are left?",
    "In the cellar of {name} there are {k} boxes, each with {m} {item}. {name} throws away {lost} "
    "{item}. How many {item} remain in the cellar?",
    "{name} fills {k} bags with {m} {item} each and then takes out {lost} {item}. "
    "How many {item} are still in the bags?",
)
def boxes(d: Draw) -> FilledTemplate:
    """Ask for the number of things left in several boxes."""
    name, item, k, m = d.word(NAMES), d.word(ITEMS), d.number(2, 9), d.number(3, 9)
    lost = d.number(2, k * m - 2)
    left = k * m - lost
    return FilledTemplate(
        {"name": name, "item": item, "k": k, "m": m, "lost": lost},
        [
            f"{name} has {k}*{m} = {k * m} {item}.\nAfter that {k * m}-{lost} = {left} {item} "
            f"are left.\n#### {left}"
        ],
    )


@skill(
    "math_reasoning",
    "sharing",
    "{name} has {k} boxes with {n} {item} each and shares them equally among {friends} friends. "
    "How many {item} does each friend get?",
    "{friends} friends divide the {item} of {name} equally. There are {k} boxes with {n} {item} "
    "in each of them. How many {item} are there for each friend?",
    "The {k} bags of {name} hold {n} {item} each. All {item} go in equal parts to {friends} "
    "friends. How many {item} does one friend receive?",
)
def sharing(d: Draw) -> FilledTemplate:
    """Ask for one person's share if the content of several boxes is shared equally."""
    name, item = d.word(NAMES), d.word(ITEMS)
    k, friends, each = d.number(2, 5), d.number(2, 5), d.number(2, 4)
    n = friends * each
    return FilledTemplate(
        {"name": name, "item": item, "k": k, "n": n, "friends": friends},
        [
            f"{name} has {k}*{n} = {k * n} {item}.\nEach friend gets {k * n}/{friends} = "
            f"{k * each} {item}.\n#### {k * each}"
        ],
    )


@skill(
    "math_reasoning",
    "saving",
    "{name} saves ${rate} a week for {weeks} weeks and then buys {thing} for ${price}. "
    "How much money does {name} have left?",
    "For {weeks} weeks {name} puts ${rate} aside every week. Then {name} pays ${price} for "
    "{thing}. How many dollars does {name} still have?",
    "{name} earns ${rate} each week. After {weeks} weeks {name} spends ${price} on {thing}. "
    "How much money is left?",
)
def saving(d: Draw) -> FilledTemplate:
    """Ask for the money left after weekly savings and one expense."""
    name, product = d.word(NAMES), d.word(PRODUCTS)
    weeks, rate = d.number(3, 9), d.number(3, 9)
    price = d.number(2, weeks * rate - 1)
    left = weeks * rate - price
    return FilledTemplate(
        {
            "name": name,
            "thing": with_article(product),
            "weeks": weeks,
            "rate": rate,
            "price": price,
        },
        [
            f"{name} saves {weeks}*{rate} = ${weeks * rate}.\nAfter buying the {product} {name} "
            f"has {weeks * rate}-{price} = ${left} left.\n#### {left}"
        ],
    )
