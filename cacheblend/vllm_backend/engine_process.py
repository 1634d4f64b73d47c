"""vLLM's engine: started, driven and ended, its failures in one sentence each."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil  # type: ignore[import-untyped]
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from cacheblend.errors import BlendError
from cacheblend.vllm_backend.early_accounts import EarlyAccounts
from cacheblend.vllm_backend.engine_arguments import REFUSALS, one_line

MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
SHUTDOWN_S = 15.0
"""How long the engine's processes may take to end by themselves; a worker on a CPU takes some seconds."""

KILLED_S = 5.0
WATCH_S = 1.0


@contextmanager
def multiprocessing_is(wanted: bool) -> Iterator[None]:
    """Have vLLM, which reads it from the environment in several places, start processes or not."""
    before = os.environ.get(MULTIPROCESSING)
    os.environ[MULTIPROCESSING] = str(int(wanted))
    try:
        yield
    finally:
        if before is None:
            del os.environ[MULTIPROCESSING]
        else:
            os.environ[MULTIPROCESSING] = before


class EngineProcess:
    """An `LLMEngine` whose core runs in processes of its own, or in this one.

    Args:
        config: vLLM's.
        in_process: run the core here.
        listener: hears of vLLM's statistics.

    Raises:
        BlendError: if it does not start.
    """

    def __init__(self, config: VllmConfig, in_process: bool, listener: EarlyAccounts) -> None:
        self._in_process = in_process
        self._engine: LLMEngine | None = None
        before = _children()
        try:
            with _interruptible():
                self._engine = LLMEngine(
                    vllm_config=config,
                    executor_class=Executor.get_class(config),
                    log_stats=True,
                    stat_loggers=[listener.made_by_vllm],
                    multiprocess_mode=not in_process,
                )
        except (*REFUSALS, RuntimeError, OSError, MemoryError) as error:
            raise BlendError(f"vLLM's engine did not start: {_reason(error)}.") from error
        finally:
            self._processes = _children() - before
            if self._engine is None:
                _end(self._processes)
        self._closing = threading.Event()
        if not in_process:
            threading.Thread(target=self._watch, name="engine-watch", daemon=True).start()

    @property
    def engine(self) -> LLMEngine:
        """The engine.

        Raises:
            BlendError: if it was closed.
        """
        if self._engine is None:
            raise BlendError("The engine is closed; start another one.")
        return self._engine

    def add(self, request_id: str, token_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Queue a request.

        Raises:
            BlendError: if vLLM refuses it, or the engine's processes have ended.
        """
        try:
            with _lives():
                self.engine.add_request(request_id, tokens_input(list(token_ids)), sampling)
        except BlendError:
            raise
        except REFUSALS as error:
            raise BlendError(f"vLLM refuses the prompt: {one_line(error)}.") from error

    def step(self) -> list[RequestOutput]:
        """vLLM's next outputs, waited for; none where it has nothing to do, for which it would wait for ever.

        Raises:
            BlendError: if the engine's processes have ended.
        """
        if not self.engine.has_unfinished_requests():
            return []
        with _lives():
            return self.engine.step()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown ones are let be."""
        if self._engine is not None:
            self._engine.abort_request(list(request_ids))

    def close(self) -> None:
        """Shut it down and wait until its processes have ended. Closing again does nothing."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        self._closing.set()
        # Workers are the core's children, not ours, and some start late.
        processes = self._processes | {d for p in self._processes for d in _descendants(p)}
        engine.engine_core.shutdown(timeout=SHUTDOWN_S)
        if self._in_process:
            _free_this_process()
        del engine
        gc.collect()
        _end(processes)

    def _watch(self) -> None:
        """Wake whoever waits for outputs of a process that was killed: vLLM only tells of ends that it lives to see."""
        outputs = self.engine.engine_core.outputs_queue
        while not self._closing.wait(WATCH_S):
            if any(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in self._processes):
                outputs.put_nowait(EngineDeadError())
                return


class _Interrupted(BaseException):
    """Ctrl-C under a name that vLLM does not know."""


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end a start: vLLM swallows a KeyboardInterrupt there, and then waits for processes that have ended."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def interrupt(signum: int, frame: Any) -> None:
        raise _Interrupted

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except _Interrupted:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _lives() -> Iterator[None]:
    try:
        yield
    except EngineDeadError as error:
        raise BlendError("vLLM's engine has ended; its own log says why. Start it again.") from error


def _reason(error: BaseException) -> str:
    if "Engine core initialization failed" in str(error):
        return "its process ended, and its log, above or with -v, says why; too little memory is the usual reason"
    return one_line(error)


def _children() -> set[psutil.Process]:
    return set(_descendants(psutil.Process()))


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [child for child in process.children(recursive=True) if not _is_multiprocessings_own(child)]
    except psutil.NoSuchProcess:
        return []


def _is_multiprocessings_own(process: psutil.Process) -> bool:
    """Whether it is Python's resource tracker, which serves the whole process and ends with it."""
    try:
        return any("resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def _end(processes: set[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(list(processes), timeout=KILLED_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=KILLED_S)


def _free_this_process() -> None:
    """Let go of what vLLM keeps for the process, so that another engine can be started in it."""
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()
