"""`opened`: an asynchronous client of a scheduler's address, or one line that says why there is none.

`within` limits the time of any coroutine.

Theory of operation. `distributed.Client` tries an address that refuses connections again until its time is over, and
waits without limit for a scheduler that accepts a connection and then says nothing. So `opened` limits the time of
everything, and knocks with a plain connection where a client is not connected at once. What goes wrong is looked into
once: a port that speaks TLS looks like one that closes connections. A scheduler that only says nothing gets no further
connection of ours, as each of these ends in its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import time
from typing import TYPE_CHECKING, TypeVar

from distributed import Client
from distributed.comm import get_address_host_port, parse_address
from distributed.comm.inproc import global_manager
from distributed.comm.registry import get_backend
from distributed.security import Security

from dask_gpurt.errors import NoAnswer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

T = TypeVar("T")

#: seconds that a question has to be answered, unless the caller says otherwise
ANSWER_SECONDS = 10.0
#: seconds for what is cancelled or closed to end; it is left behind then
_ENDING_SECONDS = 1.0
#: seconds after which a client that is not connected makes us look whether anything is there
_GRACE_SECONDS = 0.5
_SOCKETS = ("tcp", "tls", "ws", "wss")
_ENCRYPTED = ("tls", "wss")
#: of a host that is off in the same subnet, a firewall that refuses, a machine without a network
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)


async def within(seconds: float, work: Awaitable[T]) -> T:
    """The result of `work`, or `TimeoutError` after so many seconds, also where `work` does not end when cancelled."""
    task: asyncio.Future[T] = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=max(0.0, seconds))
    except asyncio.CancelledError:
        task.cancel()
        raise
    if done:
        return task.result()
    task.cancel()
    # What it raises from now on is of no interest, and must not be reported as never retrieved.
    task.add_done_callback(lambda t: t.cancelled() or t.exception())
    await asyncio.wait({task}, timeout=_ENDING_SECONDS)
    raise TimeoutError(f"no answer within {seconds:g} s")


@contextlib.asynccontextmanager
async def opened(
    address: str, *, timeout: float, security: Security | dict[str, str] | None = None
) -> AsyncIterator[Client]:
    """Connect a client to a scheduler, for as long as the block runs.

    Parameters
    ----------
    address
        Such as ``tcp://host:8786``.
    timeout
        Seconds until it must be connected.
    security
        As for `distributed.Client`; None: what Dask's configuration has under ``distributed.comm.tls``.

    Raises
    ------
    NoAnswer
        No scheduler answers there. A wrong host or port, and TLS without certificates, are known at once.
    """
    host, port = _checked(address, security)
    client = Client(address, asynchronous=True, set_as_default=False, security=security, timeout=timeout)
    try:
        await _connect(client, address, host, port, timeout)
    except NoAnswer:
        await _closed(client)
        raise
    except Exception as e:
        await _closed(client)
        raise await _why(address, host, port, e, timeout) from e
    try:
        yield client
    finally:
        await _closed(client)


async def _closed(client: Client) -> None:
    """Close a client whose scheduler may no longer read."""
    with contextlib.suppress(Exception):
        await within(2 * _ENDING_SECONDS, client.close())
    client.status = "closed"  # else its destructor tries again, and waits


def no_answer(address: str, reason: str, remedy: str) -> NoAnswer:
    """The error, on one line."""
    return NoAnswer(" ".join(f"no scheduler answers at {address!r}: {reason}. Remedy: {remedy}".split()))


def _checked(address: str, security: Security | dict[str, str] | None) -> tuple[str, int]:
    """Host and port of a socket; an empty host for addresses of other kinds, which are left to distributed."""
    try:
        scheme, place = parse_address(address)
        get_backend(scheme)
        # Dask tries one that has been closed again and again, and there is no port to knock at.
        if scheme == "inproc" and global_manager.get_listener_for(place) is None:
            raise no_answer(address, "nothing listens there in this process", "a cluster that is not closed")
        host, port = get_address_host_port(address) if scheme in _SOCKETS else ("", 0)
        if host and not 0 < port < 1 << 16:
            raise ValueError(f"port {port} is not one of 1 to 65535")  # else the system's OverflowError
    except ValueError as e:
        raise no_answer(address, str(e), "an address such as 'tcp://host:8786'") from e
    if scheme in _ENCRYPTED and not _has_certificates(address, security):
        raise no_answer(
            address,
            f"{scheme}:// needs certificates, and there are none",
            "--tls-ca-file, --tls-cert and --tls-key, or distributed.comm.tls in Dask's configuration",
        )
    return host, port


async def _connect(client: Client, address: str, host: str, port: int, timeout: float) -> None:
    began = time.monotonic()
    start = asyncio.ensure_future(client)
    try:
        await asyncio.wait({start}, timeout=min(timeout, _GRACE_SECONDS))
        if host and not start.done():
            await within(timeout - (time.monotonic() - began), _knock(host, port))
    except TimeoutError as e:
        start.cancel()
        raise no_answer(
            address, f"no connection within {timeout:g} s", "look whether the host runs, and at firewalls"
        ) from e
    except BaseException:
        start.cancel()
        raise
    await within(timeout - (time.monotonic() - began), start)


async def _knock(host: str, port: int) -> None:
    """Connect to one of the addresses of a host, in order, or raise what says most of why none can be.

    ``asyncio.open_connection`` alone joins the errors of several to one without a number, and localhost has two mostly.
    """
    failed: OSError | None = None
    for *_, place in await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            _, writer = await asyncio.open_connection(str(place[0]), port)
        except OSError as e:
            failed = failed if isinstance(failed, ConnectionRefusedError) else e
        else:
            writer.close()
            return
    if failed is not None:
        raise failed


def _has_certificates(address: str, security: Security | dict[str, str] | None) -> bool:
    known = Security(**security) if isinstance(security, dict) else security or Security()
    try:
        found = known.get_connection_args("client")
    except (OSError, ssl.SSLError, ValueError) as e:
        raise no_answer(
            address, f"the certificates cannot be used: {e}", "files in PEM format that belong together"
        ) from e
    return found.get("ssl_context") is not None


async def _why(address: str, host: str, port: int, error: Exception, timeout: float) -> NoAnswer:
    """What stood between an address and a client of it."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    certificate = next((e for e in causes if isinstance(e, ssl.SSLError)), None)
    if isinstance(error, (socket.gaierror, UnicodeError)):  # the second: no name can be such, as it is too long
        reason = error.strerror if isinstance(error, socket.gaierror) else error
        return no_answer(address, f"the host {host!r} is not known ({reason})", "another host name")
    if isinstance(error, ConnectionRefusedError):
        return no_answer(
            address,
            f"nothing listens there ({error.strerror})",
            "the address that the scheduler prints at its start; look whether it still runs",
        )
    if isinstance(error, OSError) and error.errno in _UNREACHABLE:
        return no_answer(
            address,
            f"no way leads there ({os.strerror(error.errno)})",
            "another address; look whether the host runs, and at firewalls",
        )
    if certificate is not None:
        return no_answer(
            address,
            f"TLS failed: {certificate.reason or certificate}",
            "the certificates of that cluster; tcp:// if it does not use TLS",
        )
    if isinstance(error, TimeoutError):
        return no_answer(
            address,
            f"it accepts connections, and says nothing for {timeout:g} s",
            "look whether the scheduler's process is stopped, swapped out or busy, and whether the port is its own",
        )
    scheme, _ = parse_address(address)
    if host and scheme not in _ENCRYPTED and await _speaks_tls(host, port):
        other = "wss" if scheme == "ws" else "tls"
        return no_answer(
            address, "it speaks TLS", f"{other}://{host}:{port} with --tls-ca-file, --tls-cert and --tls-key"
        )
    return no_answer(
        address,
        f"it is no scheduler of Dask, or breaks connections ({type(error).__name__}: {error})",
        "the address that the scheduler prints at its start; the dashboard has another port",
    )


async def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Only to name the fault: nothing is sent over this connection.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        _, writer = await within(_ENDING_SECONDS, asyncio.open_connection(host, port, ssl=context))
    except (OSError, ssl.SSLError):
        return False
    writer.close()
    return True
