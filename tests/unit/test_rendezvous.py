"""Ranks that meet: in threads of one process, by real connections."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdist import meeting
from tfdist.comm import hall, rendezvous
from tfdist.launch.ports import free_addresses
from tfdist.tf_config import Cluster, Task

pytest.importorskip("horovod.runner.http.http_server")


def mets(count):
    cluster = Cluster(None, tuple(free_addresses(count)))
    return [meeting.of_cluster(cluster, Task("worker", i)) for i in range(count)]


def meet_all(several, seconds=20):
    with ThreadPoolExecutor(len(several)) as pool:
        # The last first: they wait for rank 0.
        futures = [pool.submit(rendezvous.meet, each, seconds) for each in reversed(several)]
        return [future.result() if future.exception() is None else future.exception() for future in reversed(futures)]


def test_all_ranks_meet():
    found = meet_all(mets(3))
    for rank, env in enumerate(found):
        assert env["HOROVOD_RANK"] == env["HOROVOD_LOCAL_RANK"] == str(rank)
        assert env["HOROVOD_SIZE"] == env["HOROVOD_LOCAL_SIZE"] == "3"
        assert env["HOROVOD_GLOO_IFACE"] == "lo"
        assert env["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1"
    port = found[0]["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    # What Horovod's C++ does with the store afterwards.
    url = f"http://127.0.0.1:{port}/global/0"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(url, timeout=5)
    urllib.request.urlopen(urllib.request.Request(url, b"value", method="PUT"), timeout=5)
    assert urllib.request.urlopen(url, timeout=5).read() == b"value"


def test_a_rank_that_does_not_come_is_named():
    """L7."""
    first, second, _ = mets(3)
    errors = [str(error) for error in meet_all([first, second], seconds=1)]
    assert all("after 1 s there is no worker/2 at" in error for error in errors)
    assert errors[1].startswith("rank 1 (worker/1 of TF_CONFIG) on ")


def test_a_rank_0_that_does_not_come_is_named():
    met = mets(2)[1]
    with pytest.raises(RuntimeError, match=r"rank 0 \(worker/0\) at .* no answer within 0.5 s \(Connection refused\)"):
        rendezvous.meet(met, 0.5)


def test_an_address_that_is_taken():
    """L2."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        met = dataclasses.replace(mets(2)[0], address=address)
        with pytest.raises(RuntimeError, match=r"rank 0 .* cannot listen at 127.0.0.1:.*Address already in use"):
            rendezvous.meet(met, 5)


def test_an_address_that_nobody_knows():
    met = dataclasses.replace(mets(2)[0], address="no-such-host.invalid:2222")
    with pytest.raises(RuntimeError, match="does not know its own address no-such-host.invalid:2222"):
        rendezvous.meet(met, 0.5)


def test_ranks_of_different_jobs_are_told_apart():
    first = mets(2)[0]
    other = dataclasses.replace(mets(3)[1], address=first.address)
    found = meet_all([first, other], seconds=1)
    assert "no worker/1" in str(found[0])
    assert "it was started for 3 ranks" in str(found[1])


def test_a_place_is_given_once():
    first, second = mets(2)
    again = dataclasses.replace(second)
    results = meet_all([first, second, again])
    errors = [r for r in results if isinstance(r, RuntimeError)]
    assert isinstance(results[0], dict)
    assert len(errors) == 1
    # Whether it came before all had gone on or after.
    assert "is worker/1 already" in str(errors[0]) or "has begun with another worker/1" in str(errors[0])


def test_a_rank_that_ended_while_it_waited_may_come_again(monkeypatch):
    """TFJob starts a pod again while another still fetches its image."""
    monkeypatch.setattr(hall, "AWAY", 0.5)
    first, second, third = mets(3)
    address = f"http://{first.address}/tfdist/1"
    told = {"names": second.names, "common": second.common, "host": "h", "process": "dead"}
    with ThreadPoolExecutor(3) as pool:
        zero = pool.submit(rendezvous.meet, first, 20)
        while True:  # until rank 0 listens
            with contextlib.suppress(urllib.error.URLError):
                request = urllib.request.Request(address, json.dumps(told).encode(), method="PUT")
                assert urllib.request.urlopen(request, timeout=5).status == 200
                break
        two = pool.submit(rendezvous.meet, third, 20)
        with pytest.raises(TimeoutError):  # a dead rank does not count as there
            two.result(1.5)
        one = pool.submit(rendezvous.meet, second, 20)
        assert [f.result()["HOROVOD_RANK"] for f in (zero, one, two)] == ["0", "1", "2"]


def test_other_addresses_are_refused():
    first, second = mets(2)
    other = dataclasses.replace(second, common="worker/0 x:1, worker/1 y:1")
    found = meet_all([first, other], seconds=1)
    assert "its TF_CONFIG has worker/0 x:1, worker/1 y:1, and that of rank 0" in str(found[1])
    assert first.common in str(found[1])


def test_nonsense_is_refused():
    first = mets(2)[0]
    for body in (b"", b"{", b"[]", b'{"names": 3, "host": ""}'):
        assert hall.refusal(first, "1", body, {}).startswith("the message was not that of a rank")
    assert hall.refusal(first, "x", b"{}", {})


def test_a_host_that_calls_itself_loopback_listens_for_all():
    """Debian gives a host's own name the address 127.0.1.1; ranks on other hosts would not reach it there."""
    alone = mets(2)[0]
    assert hall.bind_address("127.0.1.1", alone) == "127.0.1.1"
    several = dataclasses.replace(alone, local_size=1)
    assert hall.bind_address("127.0.1.1", several) == ""
    assert hall.best({"127.0.1.1", "198.18.0.1"}) == "198.18.0.1"


def test_the_deadline_is_a_number(monkeypatch):
    monkeypatch.setenv(hall.DEADLINE, "soon")
    with pytest.raises(ValueError, match="TFDIST_START_DEADLINE is 'soon'"):
        rendezvous.join(mets(2)[1])
