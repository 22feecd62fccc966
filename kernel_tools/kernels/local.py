"""A Jupyter server of ours on loopback: the embedded default of `%remote_connect local`.

Isolated from the user's own Jupyter: other configuration, data, runtime and IPython folders, no
extensions, no terminals, one kernelspec that runs the caller's interpreter with history off. The token
is random and stands only in files of mode 0600; never on a command line, nor in a kernel's environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kernel_tools.errors import MissingDependencyError
from kernel_tools.services import ports
from kernel_tools.services import service as services
from kernel_tools.services.service import Service, ServiceOrder
from kernel_tools.settings import Secret
from kernel_tools.settings import state_dir as default_state_dir

# Not handed to the server, and so to no kernel: credentials of the laptop's side, and the marks that a
# surrounding notebook leaves on its children.
NOT_INHERITED: Final = (
    "AWS_*",
    "IPYTHONDIR",
    "JPY_*",
    "JUPYTER*",
    "KAGGLE_PROXY_URL",
    "KERNEL_TOOLS_*",
    "MINIO_*",
    "MPLBACKEND",
    "PYRUN_JUPYTER_*",
    "RUN_DIR",
    "RUN_ID",
    "RUN_SUPERVISED",
)

# Runs in the server. Extensions are found on the machine's own paths, so each is switched off by name.
_CONFIG = """\
from jupyter_core.paths import jupyter_config_path
from jupyter_server.extension.config import ExtensionConfigManager

c = get_config()
found = ExtensionConfigManager(read_config_path=jupyter_config_path()).get_jpserver_extensions()
c.ServerApp.jpserver_extensions = dict.fromkeys(found, False)
c.ServerApp.terminals_enabled = False
c.ServerApp.allow_remote_access = False
c.ServerApp.use_redirect_file = False
c.ServerApp.quit_button = False
c.ServerApp.log_level = "WARN"
c.IdentityProvider.token = {token!r}
c.KernelSpecManager.ensure_native_kernel = False
c.KernelManager.shutdown_wait_time = 1.0
c.MappingKernelManager.cull_idle_timeout = 0
c.MappingKernelManager.default_kernel_name = "python3"
"""


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A running server and this process's lease on it.

    Attributes:
        url: `http://127.0.0.1:<port>`, without a token.
        token: for the `Authorization` header.
        root_dir: the folder that kernels start in.
    """

    url: str
    token: Secret
    root_dir: Path
    service: Service

    @classmethod
    def ensure(
        cls, *, state_dir: Path | None = None, idle_seconds: float | None = None
    ) -> LocalServer:
        """Return the server for this interpreter, started if there is none.

        Args:
            state_dir: the user's private state folder (default: `settings.state_dir()`).
            idle_seconds: see `services.ensure`.

        Raises:
            MissingDependencyError: jupyter_server or ipykernel is not installed.
            ServiceError: it did not start.
        """
        _require("jupyter_server", "ipykernel")
        state_dir = default_state_dir() if state_dir is None else state_dir
        root_dir = state_dir / "local"
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        root_dir.mkdir(mode=0o700, exist_ok=True)
        service = services.ensure(
            _service_name(),
            state_dir=state_dir,
            order=lambda folder: _order(folder, root_dir, os.environ),
            ready=_answers,
            idle_seconds=idle_seconds,
        )
        return cls(
            service.endpoint, service.secrets["token"], Path(service.facts["root_dir"]), service
        )

    def watch_runs(self, runs_dir: Path) -> None:
        """Keep the server up for as long as a run in `runs_dir` lives."""
        self.service.watch_runs(runs_dir)

    def release(self) -> None:
        """Give the lease back; the server ends itself when nobody has needed it for the idle time."""
        self.service.release()

    def release_or_stop(self) -> bool:
        """Give the lease back, and end the server unless somebody needs it; returns whether it ended."""
        return self.service.release_or_stop()

    def stop(self) -> None:
        """End the server and its kernels now. Detached runs go on."""
        self.service.stop()


def _service_name() -> str:
    """One server for each interpreter: the kernel must be the caller's very Python."""
    digest = hashlib.sha256(f"{sys.executable}\0{sys.prefix}".encode()).hexdigest()
    return f"jupyter-{digest[:8]}"


def _order(folder: Path, root_dir: Path, environ: Mapping[str, str]) -> ServiceOrder:
    (port,) = ports.free(1)
    token = secrets.token_urlsafe(32)
    places = {
        "JUPYTER_CONFIG_DIR": folder / "config",
        "JUPYTER_DATA_DIR": folder / "data",
        "JUPYTER_PATH": folder / "data",  # before the paths of the environment and of the system
        "JUPYTER_RUNTIME_DIR": folder / "runtime",
        "IPYTHONDIR": folder / "ipython",
    }
    for place in places.values():
        place.mkdir(mode=0o700, exist_ok=True)
    config = folder / "config" / "jupyter_server_config.py"
    _write_private(config, _CONFIG.format(token=token))
    _write_kernelspec(folder / "data" / "kernels" / "python3")
    return ServiceOrder(
        argv=(
            sys.executable,
            "-m",
            "jupyter_server",
            f"--config={config}",
            "--ServerApp.ip=127.0.0.1",
            f"--ServerApp.port={port}",
            "--ServerApp.port_retries=0",
            "--ServerApp.base_url=/",
            f"--ServerApp.root_dir={root_dir}",
            "--ServerApp.open_browser=False",
            "--ServerApp.allow_root=True",
        ),
        env=_environment(environ) | {name: str(place) for name, place in places.items()},
        cwd=root_dir,  # a kernel that is started without a path gets the server's own folder
        endpoint=f"http://127.0.0.1:{port}",
        secrets={"token": token},
        facts={"root_dir": str(root_dir)},
        runs_dirs=(root_dir / "remote_kernel_tools" / "runs",),
    )


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    prefixes = tuple(name[:-1] for name in NOT_INHERITED if name.endswith("*"))
    return {
        name: value
        for name, value in environ.items()
        if name not in NOT_INHERITED and not name.startswith(prefixes)
    }


def _write_kernelspec(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    spec = {
        "argv": [
            sys.executable,
            "-m",
            "ipykernel_launcher",
            "-f",
            "{connection_file}",
            "--HistoryManager.enabled=False",
        ],
        "display_name": "Python 3 (kernel_tools)",
        "language": "python",
        "metadata": {"debugger": False},
    }
    (folder / "kernel.json").write_text(json.dumps(spec, indent=1), encoding="utf-8")


def _write_private(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent)  # 0600
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    Path(temporary).replace(path)


def _answers(service: Service) -> bool:
    request = urllib.request.Request(
        f"{service.endpoint}/api/status",
        headers={"Authorization": f"token {service.secrets['token'].reveal()}"},
    )
    # No proxy of the environment is asked for a loopback address.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=5) as response:
            return int(response.status) == 200
    except (urllib.error.URLError, OSError):
        return False


def _require(*modules: str) -> None:
    import importlib.util

    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise MissingDependencyError(
                f"`local` needs {module}, which is not installed.",
                hint='Type: pip install "remote-kernel-tools[local]"',
            )
