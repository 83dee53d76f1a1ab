"""Conversations with two turns: write a text, then rewrite it in another form."""

from collections.abc import Sequence

from specbench_cli.training.generated.lexicon import (
    ACTIONS,
    EVENTS,
    GEAR,
    HOBBIES,
    JOBS,
    MONTHS,
    NAMES,
    PLACES,
    SCENERY,
    TOWNS,
    TRAITS,
    WEEKDAYS,
)
from specbench_cli.training.generated.template import (
    Draw,
    FilledTemplate,
    capitalise,
    skill,
    with_article,
)


@skill(
    "multi_turn",
    "writing",
    (
        "Write a short story about {name}, {job} near the {place}, who {one}, {two} and {three}.",
        "Now rewrite your story in the past tense.",
    ),
    (
        "Tell me a story. The hero is {name}, {job} who lives near the {place}, and who {one}, "
        "{two} and {three}.",
        "Rewrite your previous response in the past tense.",
    ),
    (
        "I need a story for children: {name}, {job} near the {place}, {one}, {two} and {three}.",
        "Please tell the same story again, but in the past tense.",
    ),
)
def story_past(d: Draw) -> FilledTemplate:
    """Ask for a story in the present tense, then for the same story in the past tense."""
    name, job, place = d.word(NAMES), with_article(d.word(JOBS)), d.word(PLACES)
    deeds = d.words(ACTIONS, 3)
    one, two, three = (deed.present for deed in deeds)

    def tell(live: str, acts: Sequence[str], is_: str) -> str:
        return (
            f"{name} {is_} {job} and {live} near the {place}. One day {name} {acts[0]}. "
            f"Then {name} {acts[1]}. In the end {name} {acts[2]} and {is_} happy."
        )

    return FilledTemplate(
        {"name": name, "job": job, "place": place, "one": one, "two": two, "three": three},
        [
            tell("lives", [deed.present for deed in deeds], "is"),
            tell("lived", [deed.past for deed in deeds], "was"),
        ],
    )


@skill(
    "multi_turn",
    "writing",
    (
        "I am going to the {place} in {month} and own {gear}. What should I pack for the trip?",
        "Rewrite your answer as a numbered list.",
    ),
    (
        "My next trip goes to the {place} in {month}. At home I have {gear}. What do I need?",
        "Turn your previous response into a numbered list.",
    ),
    (
        "Write some advice on packing for the {place} in {month}. It should name {gear}.",
        "Now give me the same things as a numbered list.",
    ),
)
def packing(d: Draw) -> FilledTemplate:
    """Ask for things to pack as a text, then as a numbered list."""
    place, month, gear = d.word(PLACES), d.word(MONTHS), d.words(GEAR, 4)
    return FilledTemplate(
        {"place": place, "month": month, "gear": f"{', '.join(gear[:3])} and {gear[3]}"},
        [
            f"For a trip to the {place} in {month} you should pack {gear[0]} and {gear[1]}. "
            f"It is also wise to take {gear[2]}, and do not forget {gear[3]}.",
            "\n".join(f"{i}. {capitalise(thing)}" for i, thing in enumerate(gear, 1)),
        ],
    )


@skill(
    "multi_turn",
    "roleplay",
    (
        "Describe {name}, {job} from {town}, who is {traits} and likes {hobbies}.",
        "Rewrite your answer as if you were {name}.",
    ),
    (
        "Who is {name}? I only know this: {job} from {town}, {traits}, fond of {hobbies}.",
        "Now answer again, speaking as {name}.",
    ),
    (
        "Write a few lines about {name}. Job: {job}. Town: {town}. Nature: {traits}. "
        "Hobbies: {hobbies}.",
        "Pretend that you are {name} and say the same of yourself.",
    ),
)
def introduction(d: Draw) -> FilledTemplate:
    """Ask for the description of a person, then for the same description in the first person."""
    name, job, town = d.word(NAMES), with_article(d.word(JOBS)), d.word(TOWNS)
    traits, hobbies = " and ".join(d.words(TRAITS, 2)), " and ".join(d.words(HOBBIES, 2))
    return FilledTemplate(
        {"name": name, "job": job, "town": town, "traits": traits, "hobbies": hobbies},
        [
            f"{name} is {job} from {town}. People say that {name} is {traits}. "
            f"After work {name} enjoys {hobbies}.",
            f"My name is {name} and I am {job} from {town}. People say that I am {traits}. "
            f"After work I enjoy {hobbies}.",
        ],
    )


@skill(
    "multi_turn",
    "roleplay",
    (
        "Pretend to be {name}, {job} from {town} who likes {one} and, even more, {other}. "
        "Tell me about yourself.",
        "Now describe {name} in the third person.",
    ),
    (
        "You are {name} from {town} and work as {job}. You like {one}, but {other} still more. "
        "Introduce yourself.",
        "Sum up what we know about {name} in the third person.",
    ),
    (
        "Answer as {name}, {job} from {town}: do you like {one}, and is {other} even better?",
        "Say the same about {name} in the third person.",
    ),
)
def interview(d: Draw) -> FilledTemplate:
    """Ask for an answer in the role of a person, then for the same answer in the third person."""
    name, job, town = d.word(NAMES), with_article(d.word(JOBS)), d.word(TOWNS)
    one, other = d.words(HOBBIES, 2)
    return FilledTemplate(
        {"name": name, "job": job, "town": town, "one": one, "other": other},
        [
            f"Hello, I am {name} from {town} and I work as {job}. "
            f"In my free time I like {one}, but I like {other} even more.",
            f"{name} from {town} works as {job}. "
            f"In the free time {name} likes {one}, but {name} likes {other} even more.",
        ],
    )


@skill(
    "multi_turn",
    "extraction",
    (
        "Write a short invitation from {host} to {guest} for {event} in {town} on {day} at {hour}.",
        "List what, where, when and who from your letter.",
    ),
    (
        "{host} plans {event} in {town} on {day} at {hour}. Write to {guest} for {host}.",
        "Extract what, where, when and who from your previous response.",
    ),
    (
        "On {day} at {hour} there is {event} in {town}. Let {host} invite {guest} in a letter.",
        "Now give me only the facts: what, where, when, who.",
    ),
)
def invitation(d: Draw) -> FilledTemplate:
    """Ask for an invitation, then for the facts of the invitation as a list."""
    host, guest = d.words(NAMES, 2)
    event, town, day, hour = d.word(EVENTS), d.word(TOWNS), d.word(WEEKDAYS), d.number(2, 9)
    gaps = {"host": host, "guest": guest, "event": with_article(event), "town": town}
    return FilledTemplate(
        {**gaps, "day": day, "hour": hour},
        [
            f"Dear {guest},\nI would like to invite you to {with_article(event)} in {town}. "
            f"It takes place on {day} and begins at {hour} in the evening. "
            f"Please tell me soon whether you can come.\nYours, {host}",
            f"What: {event}\nWhere: {town}\nWhen: {day} at {hour}\nWho: {host} and {guest}",
        ],
    )


@skill(
    "multi_turn",
    "extraction",
    (
        "Plan {day} in {town} for {name}: {first} at {a}, {second} at {b} and {third} at {c}.",
        "Write your plan as a timetable.",
    ),
    (
        "What can {name} do in {town} on {day}? There is {first} at {a}, {second} at {b} and "
        "{third} at {c}.",
        "Turn your previous response into a timetable.",
    ),
    (
        "{name} will be in {town} on {day}. Make a plan with {first} at {a}, {second} at {b} and "
        "{third} at {c}.",
        "Now write the same as a timetable.",
    ),
)
def schedule(d: Draw) -> FilledTemplate:
    """Ask for a plan for a day, then for the same plan as a timetable."""
    name, day, town = d.word(NAMES), d.word(WEEKDAYS), d.word(TOWNS)
    hours = sorted(d.rng.sample(range(2, 10), 3))
    events = d.words(EVENTS, 3)
    first, second, third = (with_article(event) for event in events)
    table = "\n".join(f"{hour}:00 {event}" for hour, event in zip(hours, events, strict=True))
    gaps = dict(zip("abc", hours, strict=True)) | {"name": name, "day": day, "town": town}
    return FilledTemplate(
        {**gaps, "first": first, "second": second, "third": third},
        [
            f"On {day} at {hours[0]} {name} can go to {first} in {town}. At {hours[1]} there "
            f"is {second}, and at {hours[2]} the day ends with {third}.",
            f"{day} in {town}\n{table}",
        ],
    )


@skill(
    "multi_turn",
    "humanities",
    (
        "Write three lines of poetry about the {place} in {month}: {one}, {two}, {three}.",
        "Reverse the order of your lines.",
    ),
    (
        "A tiny poem about the {place} in {month}, please. Its lines begin with {one}, {two} and "
        "{three}.",
        "Write your poem again from last to first.",
    ),
    (
        "Make a poem of three lines on {one}, {two} and {three}, set by the {place} in {month}.",
        "Now put the lines of the poem in reverse order.",
    ),
)
def poem_reversed(d: Draw) -> FilledTemplate:
    """Ask for a poem, then for its lines in reverse order."""
    place, month, scenes = d.word(PLACES), d.word(MONTHS), d.words(SCENERY, 3)
    lines = [f"{capitalise(scene.thing)} {scene.does} the {place}," for scene in scenes]
    one, two, three = (scene.thing for scene in scenes)
    end = f"here in {month}."
    return FilledTemplate(
        {"place": place, "month": month, "one": one, "two": two, "three": three},
        ["\n".join([*lines, end]), "\n".join([*reversed(lines), end])],
    )
