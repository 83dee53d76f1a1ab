"""`specbench train rest`: build the datastore of REST."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench_cli import output
from specbench_cli.commands.training import _shared as shared
from specbench_cli.config.options import parsed_command
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from specbench_cli.config.train import DatastoreOptions
    from specbench_cli.training.corpus import Chat

SMOKE = 24
"""Number of replies in a smoke test."""


@parsed_command("specbench_cli.config.train:DatastoreOptions")
def rest(options: DatastoreOptions) -> None:
    """Build a REST datastore: tokenized texts and their suffix array, in OUT/datastore.

    With --text, the datastore contains your text files, for any target. Without --text, the target
    answers training questions, and the datastore contains its replies, which are stored in
    OUT/training. This works only for the small targets of specbench (embedded). Repeat the command
    to resume.
    """
    from specbench_cli.models import resolve
    from specbench_cli.training.corpus import load_gsm8k
    from specbench_cli.training.datastore import DatastoreMaker

    out, fresh = options.out, not options.resume
    shared.check_model(out, "datastore")
    folder = resolve(options.target).path
    with shared.show_bars() as report:
        if options.text:
            if options.smoke:
                raise UsageError("--smoke and --text cannot be combined", "omit one of them")
            maker = DatastoreMaker(out, folder, lambda done: report.count("texts", done, None))
            made = maker.make_from_texts(options.text, fresh=fresh)
        else:
            problems: list[Chat] = [] if options.smoke else load_gsm8k(options.data)
            n, place = (
                SMOKE if options.smoke else options.replies,
                shared.choose_device(options.device),
            )
            maker = DatastoreMaker(out, folder, lambda done: report.count("replies", done, n))
            made = maker.make_from_replies(problems, n, options.seed, place, fresh=fresh)
    output.data(str(made))
