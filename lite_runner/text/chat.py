"""Chat templates: untrusted Jinja programs, rendered in a process of their own.

jinja2's sandbox keeps a template from Python's internals and from changing its inputs. It bounds
neither time nor memory, and counting operators, calls and lengths inside it would bound them only
as far as the count is complete: filters, str's methods, comparisons of shared lists, regular
expressions and the compiler itself each build or compute as much as they are told to. So the kernel
bounds the process: its address space, its processor time, and no files; who asks it bounds the time
on the clock. Nothing that a template does, a crash of the interpreter included, reaches the runner.

The process is started once and answers in a fraction of a millisecond; it imports jinja2 in place
of this one. The dialect is that of transformers.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Mapping
from typing import Any

from lite_runner.errors import ArtifactError, EnvironmentFault
from lite_runner.text.template_process import Limits, TemplateLimitError, TemplateProcess

LIMITS = Limits()
MAX_TEMPLATE_CHARS = 1 << 20
_HINT = "check the roles and their order, or leave out chat=true"

_lock = threading.Lock()
_process: TemplateProcess | None = None  # guarded by the lock


def render_template(
    template: str, values: Mapping[str, Any], *, source: str, limits: Limits = LIMITS
) -> str:
    """Render `template` with `values`, which are JSON. Threads take turns.

    Raises ArtifactError naming `source` if it fails, or takes more than `limits`.
    """
    if len(template) > MAX_TEMPLATE_CHARS:
        raise ArtifactError(
            f"{source}: chat template of {len(template)} characters, "
            f"at most {MAX_TEMPLATE_CHARS} are expected"
        )
    with _lock:
        try:
            return _started(limits).render(template, values)
        except ValueError as error:
            raise ArtifactError(f"{source}: the chat template {error}", _HINT) from None
        except TemplateLimitError as error:
            _close()
            raise ArtifactError(
                f"{source}: the chat template failed: {error}, which no template of a model does",
                "take the model's files from where it was published, or leave out chat=true",
            ) from None
        except OSError as error:
            _close()
            raise EnvironmentFault(
                f"no process for chat templates: {error}", "free memory"
            ) from error
        except BaseException:
            _close()
            raise


def _started(limits: Limits) -> TemplateProcess:
    """The process of this one; after a fork, the other's is left alone."""
    global _process
    if _process is None or not _process.is_alive or _process.limits != limits:
        _close()
        _process = TemplateProcess(limits)
    return _process


@atexit.register
def _close() -> None:
    global _process
    if _process is not None:
        _process.close()
    _process = None
