"""Audits: run the checks on a method and create its certificate."""

from __future__ import annotations

import inspect
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

import torch

from specbench_cli import registry
from specbench_cli.audit.certificate import Certificate, certify
from specbench_cli.audit.checks.bookkeeping import check_bookkeeping
from specbench_cli.audit.checks.bounds import check_bounds
from specbench_cli.audit.checks.declarations import check_declarations
from specbench_cli.audit.checks.distribution import check_distribution
from specbench_cli.audit.checks.embedded import check_embedded
from specbench_cli.audit.checks.grammar import check_grammar
from specbench_cli.audit.checks.model import check_model
from specbench_cli.audit.checks.recurrent import check_recurrent
from specbench_cli.audit.checks.sampled import check_generator
from specbench_cli.audit.checks.tokens import check_batch, check_order, check_tokens
from specbench_cli.audit.finding import DECLARATIONS, Finding, Problem
from specbench_cli.audit.subject import AuditSubject
from specbench_cli.config import plugin_file
from specbench_cli.engine.method import Method
from specbench_cli.engine.workers.process_lifetime import block_interrupts, exit_on_interrupt
from specbench_cli.errors import MethodFault, message_of, to_one_line
from specbench_cli.interpreter import usable_cpus

Check = Callable[[AuditSubject], list[Finding]]

TABLE_CHECKS: dict[str, Check] = {
    DECLARATIONS: check_declarations,
    "distribution": check_distribution,
    "tokens": check_tokens,
    "grammar": check_grammar,
    "order": check_order,
    "batch": check_batch,
    "states": check_bookkeeping,
    "recurrent": check_recurrent,
    "twin draft": check_bounds,
    "generator": check_generator,
}
"""Checks that use table models, by the name of their first finding."""

CHECKS: dict[str, Check] = {
    **TABLE_CHECKS,
    "model": check_model,
    "embedded": check_embedded,
}
PEER_CHECKS: dict[str, Check] = {"model": check_model}
"""Checks of a peer, which is a method that decodes with another program."""


def audit(name: str, plugins: Sequence[str] = ()) -> Certificate:
    """Audit one method.

    Args:
        name: canonical name of the method.
        plugins: plug-in files to register first.
    """
    for file in plugins:
        registry.load_plugin(file)
    start = time.perf_counter()
    subject = AuditSubject.from_method(name, registry.load(name))
    findings = run_checks(subject, PEER_CHECKS if subject.method.peer else CHECKS)
    return certify(subject, findings, time.perf_counter() - start)


def audit_all(names: Sequence[str], plugins: Sequence[str] = ()) -> Iterator[Certificate]:
    """Audit methods in parallel on all usable CPUs. Yield certificates as they are finished."""
    workers = min(usable_cpus(), len(names))
    if workers < 2:
        for name in names:
            yield audit(name, plugins)
        return
    # Start new interpreters. A forked process would inherit torch's threads in an undefined state.
    context = multiprocessing.get_context("spawn")
    with block_interrupts(context):  # creating the pool starts a process too
        pool = ProcessPoolExecutor(workers, context, _init_worker, (plugin_file.pinned_contents(),))
    waiting: list[Future[Certificate]]
    try:
        with block_interrupts(context):
            waiting = [pool.submit(audit, name, plugins) for name in names]
        for done in as_completed(waiting):
            yield done.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    # End the pool, because a process releases its semaphores only when it ends.
    pool.shutdown()


def _init_worker(held: Mapping[Path, bytes]) -> None:
    """Initialise a process of the pool with the plug-in files of the parent process."""
    plugin_file.pin_all(held)
    exit_on_interrupt()


def run_checks(subject: AuditSubject, checks: dict[str, Check]) -> list[Finding]:
    """Run checks and return all findings in order."""
    found: list[Finding] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # table models are too small for several threads
    try:
        with torch.inference_mode():
            for name, check in checks.items():
                found += run_check(subject, name, check)
    finally:
        torch.set_num_threads(threads)
    return found


def run_check(subject: AuditSubject, name: str, check: Check) -> Sequence[Finding]:
    """Run one check and return its findings. An exception of the method becomes a finding."""
    start = time.perf_counter()
    try:
        findings = check(subject)
    except MethodFault as refused:
        where = f"while checking: {name}"
        problem = Problem(f"the engine rejects it: {refused.message}", where, refused.hint or "")
        findings = [Finding(name, False, {}, problem)]
    except Exception as error:  # any exception of a method is a finding
        findings = [Finding(name, False, {}, _describe_crash(subject, error, name), crashed=True)]
    seconds = (time.perf_counter() - start) / max(1, len(findings))
    return [replace(finding, seconds=seconds) for finding in findings]


def _describe_crash(subject: AuditSubject, error: Exception, name: str) -> Problem:
    """Return the problem to report for an exception.

    If a line of the method is in the traceback, the problem names this line.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own_files = {
        inspect.getsourcefile(kind)
        for kind in subject.method.__mro__
        if kind not in (Method, object)
    }
    own_frames = [frame for frame in frames if frame.filename in own_files]
    last = (own_frames or frames)[-1] if frames else None
    place = f"{Path(last.filename).name}:{last.lineno}" if last else "?"
    where = f"{place}, while checking: {name}"
    what = to_one_line(f"{type(error).__name__}: {message_of(error)}")
    raised_here = last is None or frames[-1] is last
    if own_frames:
        return Problem(
            f"it raises {what}" if raised_here else f"a function that it calls raises {what}",
            where,
            "that line; the error is the method's own, so `--traceback` shows nothing more",
        )
    return Problem(
        f"the audit's own code raises {what}",
        where,
        "the last value that the method returned: the audit could not read it. If that value is"
        " correct, the audit is wrong: please report it with the method's file",
    )
