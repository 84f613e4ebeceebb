"""TF_CONFIG: which addresses are read and which are refused."""


import pytest

from tests.helpers.tf_config import ADDRESSES, CLUSTER, config, refused
from tfdist.tf_config import Cluster, parse


class TestAddresses:
    def test_a_dict_of_indices(self):
        cluster = {**ADDRESSES, "worker": {"1": "c:1", "0": "b:1"}}
        assert parse(config(cluster))[0] == CLUSTER

    @pytest.mark.parametrize(
        "value",
        [{"1": "b:1"}, {"0": "b:1", "2": "c:1"}, {"a": "b:1"}, {"00": "b:1"}, {"-1": "b:1"}],
    )
    def test_a_dict_with_gaps(self, value):
        refused(
            config({"worker": value}), f"cluster.worker has the keys {list(value)}", "without a gap"
        )

    @pytest.mark.parametrize("value", ["b:1,c:1", "", None, 1, True])
    def test_no_list(self, value):
        refused(
            config({"worker": value}), f"cluster.worker is {value!r}", "a list", '["host0:2222"]'
        )

    @pytest.mark.parametrize(
        ("address", "cure"),
        [
            ("", "Write host and port"),
            ("b", "Write host and port"),
            (":1", "Write host and port"),
            ("[::1]", "Write host and port"),
            ("b:", "The port is ''"),
            ("b:0", "The port is '0'"),
            ("b:65536", "from 1 to 65535"),
            ("b:123456789", "from 1 to 65535"),
            ("b:-1", "The port is '-1'"),
            ("b:+1", "The port is '+1'"),
            ("b:http", "The port is 'http'"),
            ("b:1.0", "The port is '1.0'"),
            ("b:\u0662", "The port is"),
            ("b:1 ", "The port is '1 '"),
            ("http://b:1", "Remove 'http://'"),
            ("grpc://b:1", "Remove 'grpc://'"),
            ("::1:2222", "brackets"),
            ("fe80::2:2222", "brackets"),
            ("[b]:1", "Only an IPv6 address"),
            ("[10.0.0.1]:1", "Only an IPv6 address"),
            ("[]:1", "Only an IPv6 address"),
            (" b:1", "One name of a host"),
            ("b c:1", "One name of a host"),
            ("b/c:1", "One name of a host"),
            ("b:1,c:1", "One name of a host"),
            (None, "quotes"),
            (2222, "quotes"),
            (["b:1"], "quotes"),
        ],
    )
    def test_malformed(self, address, cure):
        refused(
            config({"worker": ["a:1", address]}),
            f"cluster.worker[1] is {address!r}",
            '"host:port"',
            cure,
        )
        refused(
            config({"worker": {"0": "a:1", "1": address}}),
            f"cluster.worker[1] is {address!r}",
            cure,
        )

    @pytest.mark.parametrize(
        "address",
        ["[::1]:2222", "b:1", "b:65535", "10.0.0.1:2222", "job_1-ps-0.ns.svc.cluster.local:2222"],
    )
    def test_well_formed(self, address):
        assert parse(config({"worker": [address]}, {"type": "worker", "index": 0}))[0].workers == (
            address,
        )

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("b:1", "b:1"),
            ("b:1", "B:1"),
            ("b:80", "b:080"),
            ("localhost:1", "127.0.0.1:1"),
            ("LocalHost:1", "[::1]:1"),
            ("127.0.0.1:1", "127.0.0.2:1"),
            ("[fe80::2]:1", "[FE80:0::2]:1"),
        ],
    )
    @pytest.mark.parametrize("job", ["ps", "evaluator"])
    def test_twice(self, one, other, job):
        cluster = {"worker": [one], job: [other]}
        refused(
            config(cluster),
            "cluster.worker[0]",
            f"cluster.{job}[0]",
            repr(one),
            repr(other),
            "another port",
        )

    def test_a_host_with_two_ports_is_fine(self):
        assert parse(config({"worker": ["b:1", "b:2"], "ps": ["b:3"]}))

    @pytest.mark.parametrize(
        "loopback", ["localhost:1", "LOCALHOST:1", "127.0.0.1:1", "127.8.0.1:1", "[::1]:1"]
    )
    @pytest.mark.parametrize("job", ["ps", "evaluator"])
    def test_loopback_beside_other_hosts(self, loopback, job):
        for cluster in ({"worker": ["b:1"], job: [loopback]}, {job: [loopback], "worker": ["b:1"]}):
            refused(
                config(cluster),
                f"cluster.{job}[0] is {loopback!r}",
                "cluster.worker[0] is 'b:1'",
                "reach",
            )

    def test_all_loopback_is_fine(self):
        assert parse(config({"worker": ["localhost:1", "127.0.0.1:2"], "ps": ["[::1]:3"]}))

    def test_a_cluster_made_in_python_is_checked_as_well(self):
        with pytest.raises(
            ValueError, match=r"TF_CONFIG: cluster.worker\[0\] is 'a:1', the same .* cluster.chief"
        ):
            Cluster("a:1", ("a:1",))
