"""Send one file to the store by presigned URLs: in one PUT, or in parts where it is large.

No message holds a URL.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import re
import threading
import time
from typing import Callable, Dict, List, Optional, Tuple, Union

from .errors import PushError, SourceError, UploadGoneError
from .presigned import (
    LINE_ERRORS,
    MOST_FAILURES,
    Body,
    Line,
    RefusedError,
    describe_failure,
    wait_after,
)
from .targets import PartedUpload, Target

# S3 takes no more in one PUT.
MOST_PUT_BYTES = 5 << 30
_PARALLEL_PARTS = 3
_READ_BYTES = 1 << 20
_AGAIN = "%remote_attach renews the links"


class Slice:
    """A piece of a file as a request's body; hashed while it is sent, ended by `check`."""

    def __init__(
        self, descriptor: int, offset: int, length: int, check: Callable[[int], None]
    ) -> None:
        self.sha256 = hashlib.sha256()
        self._descriptor, self._offset, self._left = descriptor, offset, length
        self._check = check

    def read(self, count: int = -1) -> bytes:
        """Return the next bytes; the file may have grown, but not shrunk."""
        wanted = self._left if count < 0 else min(count, self._left)
        if not wanted:
            return b""
        try:
            data = os.pread(self._descriptor, wanted, self._offset)
        except OSError as error:  # else it would pass for trouble of the line
            raise SourceError(f"a file cannot be read: {error.strerror}") from error
        if not data:
            raise SourceError("a file became shorter while it was sent")
        self._offset += len(data)
        self._left -= len(data)
        self.sha256.update(data)
        self._check(len(data))
        return data


class Sender:
    """Sends files and documents; keeps its connection from one to the next.

    Args:
        check: called with the bytes that went out just now; may raise to end it.
        wait: sleeps between tries.
    """

    def __init__(
        self,
        *,
        check: Callable[[int], None] = lambda _sent: None,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._check = check
        self._wait = wait
        self._line = Line("")

    def close(self) -> None:
        """Let go of the connection."""
        self._line.close()

    def send_bytes(self, data: bytes, target: Target, *, name: str) -> str:
        """Write a small object; return its SHA-256. Raises PushError."""
        self._put(self._line, target.url, lambda: data, len(data), name)
        return hashlib.sha256(data).hexdigest()

    def send_file(
        self,
        path: str,
        target: Target,
        *,
        name: str,
        part_bytes: int,
        upload: Optional[PartedUpload] = None,
    ) -> Tuple[str, int]:
        """Write a file as it is when it is opened; return its SHA-256 and size.

        Args:
            path: of the file; one that is replaced meanwhile is sent as it was.
            target: the object.
            name: what to call it in messages.
            part_bytes: size of a part.
            upload: to send it in parts; not used for a file of one part.

        Raises:
            SourceError: it is gone, or cannot be read.
            PushError: it cannot be sent; one sentence.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise SourceError(f"{name} cannot be read: {error.strerror}") from error
        try:
            size = os.fstat(descriptor).st_size
            if upload is not None and part_bytes < size <= part_bytes * len(upload.parts):
                with contextlib.suppress(UploadGoneError):  # one PUT may do it too
                    return self._in_parts(descriptor, size, upload, name, part_bytes), size
            if size > MOST_PUT_BYTES:
                raise PushError(
                    f"{name} has {size / 1e9:.1f} GB, more than one request may carry, "
                    f"and no links for its parts are left: {_AGAIN}"
                )
            bodies: List[Slice] = []

            def body() -> Slice:
                bodies.append(Slice(descriptor, 0, size, self._check))
                return bodies[-1]

            self._put(self._line, target.url, body, size, name)
            return bodies[-1].sha256.hexdigest(), size
        finally:
            os.close(descriptor)

    def _in_parts(
        self, descriptor: int, size: int, upload: PartedUpload, name: str, part_bytes: int
    ) -> str:
        count = -(-size // part_bytes)
        left = list(range(count))
        tags: Dict[int, str] = {}
        errors: List[BaseException] = []
        lock = threading.Lock()

        def carry() -> None:
            line = Line("")
            try:
                while True:
                    with lock:
                        if errors or not left:
                            return
                        number = left.pop(0)
                    start = number * part_bytes
                    length = min(part_bytes, size - start)
                    tags[number] = self._put(
                        line, upload.parts[number],
                        lambda: Slice(descriptor, start, length, self._check), length, name,  # noqa: B023
                    )  # fmt: skip
            except Exception as error:  # noqa: BLE001 - raised again by who waits
                errors.append(error)
            finally:
                line.close()

        threads = [
            threading.Thread(target=carry, name=f"parts of {name}", daemon=True)
            for _ in range(min(_PARALLEL_PARTS, count))
        ]
        for thread in threads:
            thread.start()
        whole = Slice(descriptor, 0, size, lambda _sent: None)
        try:
            while not errors and whole.read(_READ_BYTES):
                pass
        except SourceError as error:  # raised once nobody reads the descriptor any more
            errors.append(error)
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        self._complete(upload.complete, [tags[number] for number in range(count)], name)
        return whole.sha256.hexdigest()

    def _complete(self, url: str, tags: List[str], name: str) -> None:
        rows = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>"
            for number, tag in enumerate(tags, 1)
        )
        body = f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>".encode()
        failures = 0
        while True:
            try:
                response = self._line.send("POST", url, body, {"Content-Length": str(len(body))})
                said = response.read().decode("utf-8", "replace")
            except RefusedError as error:
                failures = self._after_refusal(error, name, failures)
            except LINE_ERRORS as error:
                self._line.close()
                failures = self._after(describe_failure(url, error), name, failures)
            else:
                # The store answers 200 before it knows; what went wrong stands in the body.
                failed = re.search(r"<Error>.*?<Code>([A-Za-z0-9]+)", said, re.DOTALL)
                if failed is None:
                    return
                failures = self._after(f"the store answered {failed.group(1)}", name, failures)

    def _put(
        self,
        line: Line,
        url: str,
        body: Callable[[], Union[bytes, Slice]],
        length: int,
        name: str,
    ) -> str:
        """One PUT, tried again where that may help; returns the object's tag."""
        failures = 0
        while True:
            try:
                content: Body = body()  # type: ignore[assignment]
                response = line.send("PUT", url, content, {"Content-Length": str(length)})
                tag = _read(response)
            except RefusedError as error:
                line.close()  # what was not sent of the body must not meet the next request
                failures = self._after_refusal(error, name, failures)
            except LINE_ERRORS as error:
                line.close()
                failures = self._after(describe_failure(url, error), name, failures)
            else:
                return tag

    def _after_refusal(self, error: RefusedError, name: str, failures: int) -> int:
        if error.code == "NoSuchUpload":
            raise UploadGoneError(error.sentence("upload", name, again=_AGAIN)) from None
        if not error.passing:
            raise PushError(error.sentence("upload", name, again=_AGAIN)) from None
        return self._after(str(error), name, failures)

    def _after(self, failure: str, name: str, failures: int) -> int:
        if failures >= MOST_FAILURES:
            raise PushError(f"cannot upload {name}: {failure}") from None
        wait_after(failures + 1, self._wait)
        return failures + 1


def _read(response: http.client.HTTPResponse) -> str:
    response.read()
    return response.getheader("ETag") or ""
