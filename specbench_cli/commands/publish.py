"""`specbench publish`: add finished runs to a gallery of static pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench_cli import output
from specbench_cli.config.options import parsed_command
from specbench_cli.errors import ExitCode

if TYPE_CHECKING:
    from specbench_cli.config.commands import PublishOptions

EXAMPLES = (
    "specbench publish last --to gallery",
    "specbench publish results/reference/default-2cores last --to gallery",
    "specbench publish 20261121T102403Z-mini-1f2e3d4c --to gallery --json",
)
EPILOG = "\n\n".join(("Examples:", *EXAMPLES))


@parsed_command("specbench_cli.config.commands:PublishOptions")
def publish(options: PublishOptions) -> ExitCode:
    """Publish runs in a gallery of static HTML pages with a leaderboard.

    The leaderboard has sections by target, task, machine, settings and guarantee. Each run gets a
    page with its figure, table and full report; publishing it again replaces the page.

    A run is refused if it is not finished, if outputs failed or a method is broken, if other
    programs disturbed its times, if the program or the machine changed while it ran, if it has
    several targets, if it used --verify replay or models with random weights, or if no method has a
    speedup over vanilla.
    """
    from specbench_cli.report.gallery.checks import check_publishable
    from specbench_cli.report.gallery.gallery import publish as add
    from specbench_cli.report.report_data import read_report_data
    from specbench_cli.store.run_dir import RunDir, find_run

    found = [read_report_data(RunDir.open(find_run(run))) for run in options.runs]
    for run in found:
        check_publishable(run)
    for run in found:
        published = add(run, options.to, overwrite=options.overwrite)
        entry = published.entry
        if options.as_json:
            output.json_line(
                {
                    "run": entry.name,
                    "page": str(published.page),
                    "index": str(published.index),
                    "replaced": published.replaced,
                    "target": entry.target,
                    "tasks": entry.prompts,
                    "machine": entry.machine,
                    "sentences": list(entry.sentences),
                }
            )
        else:
            output.data(str(published.page))
    if not options.as_json:
        output.data(str(published.index))
    return ExitCode.OK
