"""Warm-up of a method before it is measured, so that lazy initialization is not timed."""

from __future__ import annotations

from collections.abc import Sequence

from specbench_cli.engine.batch import Batch
from specbench_cli.engine.learning import Memory, learn
from specbench_cli.engine.peer_session import PeerSession
from specbench_cli.engine.request import Request
from specbench_cli.engine.session import Session
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.measure.bench import Bench
from specbench_cli.measure.method_code import enforce_time_limit, run_workers
from specbench_cli.plan.method_run import MethodRun
from specbench_cli.plan.plan import Plan
from specbench_cli.tasks.schema import Question

WARM_UP_TOKENS = 16
WARM_UP_ROUNDS = 2


class WarmUp:
    """Warm-up of a run: the requests that each method decodes before it is measured.

    Args:
        plan, bench: The plan of the run, and its loaded models.
        question: The question to decode. It is the first question that will be measured.

    Attributes:
        ids: Token ids of the question's prompt.
    """

    def __init__(self, plan: Plan, bench: Bench, question: Question) -> None:
        self._bench, self._size = bench, plan.config.batch or 1
        self.ids = tuple(bench.encode_prompt(question))
        bench.workspace.reserve(len(self.ids) + max(WARM_UP_TOKENS, plan.max_new_tokens(question)))
        stop = bench.stop_rule(WARM_UP_TOKENS)
        self._request = bench.create_request("warm-up", 1, self.ids, stop)
        # The first prefill of each prompt length is slower. The first method would pay for all
        # lengths and look slower than the other methods. So decode a prompt of each length now.
        lengths = {
            len(prompt): prompt
            for each in (plan.questions if self._size > 1 else ())
            for prompt in (tuple(bench.encode_prompt(each)),)
        }
        self._together = [
            bench.create_request(f"warm-up {n}", 1, prompt, stop) for n, prompt in lengths.items()
        ]
        bench.workspace.reserve(max([len(self.ids), *lengths]) + WARM_UP_TOKENS)
        limit = plan.config.timeout_per_prompt
        self._limit = limit and limit * (1 + len(self._together))

    def run(self, method_run: MethodRun, sampling: Sampling, memory: Memory) -> None:
        """Decode the warm-up requests with a method. Errors of the method are raised."""
        with enforce_time_limit(self._limit):
            how = self._together, self._size
            warm_up(method_run, self._bench.workspace, self._request, sampling, memory, *how)


def warm_up(
    method_run: MethodRun,
    workspace: Workspace,
    request: Request,
    sampling: Sampling,
    memory: Memory,
    batch_requests: Sequence[Request] = (),
    size: int = 1,
) -> None:
    """Decode a request with a method, so that lazy initialization and cold caches are not timed.

    Args:
        method_run: The method.
        workspace: Decoders and states.
        request: The request.
        sampling: Sampling settings.
        memory: Data that the method has learned. The method also learns from this request.
        batch_requests: Requests that the method also decodes as a batch, if the method supports
            batches.
        size: Number of sequences in a step of this batch.
    """
    kind = PeerSession if method_run.method.peer else Session
    own = memory if method_run.method.learns else None
    workspace = workspace.decode_alone(method_run.method.decodes)
    session = kind(workspace, request, sampling, memory=own)
    with run_workers(session, workspace.transport, method_run.method.workers > 1):
        for _ in method_run.method.generate(session):
            pass
    if method_run.method.learns:
        learn(method_run.method, session)
    if batch_requests and method_run.method.batches:
        slots = method_run.method.max_sequences(size)
        batch = Batch(workspace, batch_requests, sampling, size=size, slots=slots, memory=own)
        for _ in method_run.method.generate_batch(batch):
            pass
