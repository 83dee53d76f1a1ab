"""Audits of registered methods: each a certificate, several at once in processes of their own."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path

from specbench_cli import registry
from specbench_cli.audit.certificate import Certificate, certify
from specbench_cli.audit.runner import CHECKS, PEER_CHECKS, run_checks
from specbench_cli.audit.subject import Subject
from specbench_cli.config import plugin_file
from specbench_cli.engine.workers.lifeline import deaf_to_interrupts, leave_at_interrupts
from specbench_cli.interpreter import usable_cpus


def audit(name: str, plugins: Sequence[str] = ()) -> Certificate:
    """Audit one method.

    Args:
        name: its canonical name.
        plugins: files whose methods are to be registered first.
    """
    for file in plugins:
        registry.load_plugin(file)
    start = time.perf_counter()
    subject = Subject.of(name, registry.load(name))
    findings = run_checks(subject, PEER_CHECKS if subject.method.peer else CHECKS)
    return certify(subject, findings, time.perf_counter() - start)


def audit_all(names: Sequence[str], plugins: Sequence[str] = ()) -> Iterator[Certificate]:
    """Audit methods on all CPUs that this process may use; certificates come as they are done."""
    workers = min(usable_cpus(), len(names))
    if workers < 2:
        for name in names:
            yield audit(name, plugins)
        return
    # Fresh interpreters: a fork would inherit torch's threads in whatever state they are.
    context = multiprocessing.get_context("spawn")
    with deaf_to_interrupts(context):  # its locks start a process too
        pool = ProcessPoolExecutor(workers, context, _begin, (plugin_file.held(),))
    waiting: list[Future[Certificate]]
    try:
        with deaf_to_interrupts(context):
            waiting = [pool.submit(audit, name, plugins) for name in names]
        for done in as_completed(waiting):
            yield done.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    # A process releases its semaphores only when it ends.
    pool.shutdown()


def _begin(held: Mapping[Path, bytes]) -> None:
    """Begin a process of the pool, which runs the same plug-ins as the one that starts it."""
    plugin_file.hold_all(held)
    leave_at_interrupts()
