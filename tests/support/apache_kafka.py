"""A real Apache Kafka, so that a compatibility test can be proved before it judges us.

    python -m tests.support.apache_kafka [DATA_DIR]

runs one node (KRaft) on loopback until Ctrl-C and prints what points the tests at it.
It has a listener of every protocol, and knows `USER`.

    python -m tests.support.apache_kafka --test tests/producer tests/client

runs pytest with these arguments against a node of its own, one test after another.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import jwt
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from tests.client import certificates
from tests.support.fetch_clients import JAVA_DIR, fetch_java_tools
from tests.support.ports import reusable_port

START_TIMEOUT_S: Final = 180

BOOTSTRAP_VARIABLE: Final = "MPBROKER_TEST_BOOTSTRAP"
LISTENERS_VARIABLE: Final = "MPBROKER_TEST_LISTENERS"
"""JSON: the address of each listener by its protocol."""

USER, PASSWORD = "alice", "wonder,land="  # of PLAIN; those of SCRAM are a test's to add
PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")

_MODULES: Final = "org.apache.kafka.common.security"
_MECHANISMS: Final = {
    "PLAIN": f'{_MODULES}.plain.PlainLoginModule required user_{USER}="{PASSWORD}"',
    "SCRAM-SHA-256": f"{_MODULES}.scram.ScramLoginModule required",
    "SCRAM-SHA-512": f"{_MODULES}.scram.ScramLoginModule required",
    # It takes tokens that nobody has signed, as Kafka does where it is told of no keys.
    "OAUTHBEARER": f"{_MODULES}.oauthbearer.OAuthBearerLoginModule required"
    ' unsecuredLoginStringClaim_sub="broker"',
}

_PROPERTIES: Final = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
listeners={listeners},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners={listeners}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,{protocol_map}
inter.broker.listener.name=PLAINTEXT
ssl.keystore.type=PEM
ssl.keystore.key={key}
ssl.keystore.certificate.chain={chain}
sasl.enabled.mechanisms={mechanisms}
delegation.token.secret.key=a secret of tests
log.dirs={data_dir}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=500
group.consumer.min.session.timeout.ms=1500
group.consumer.session.timeout.ms=1500
group.consumer.min.heartbeat.interval.ms=100
group.consumer.heartbeat.interval.ms=100
offsets.topic.num.partitions=5
transaction.abort.timed.out.transaction.cleanup.interval.ms=200
"""

ISSUER, AUDIENCE = "https://issuer.test", "tests"  # of the tokens that token() makes
_KEY_ID: Final = "tests"


def java_command(
    main_class: str, *arguments: str, heap: str = "256m", jars: Path = JAVA_DIR
) -> list[str]:
    """Return the command that runs a main class of Apache Kafka's jars."""
    return [
        "java",
        f"-Xmx{heap}",
        # A tool lives for a second: compile it quickly rather than well.
        "-XX:TieredStopAtLevel=1",
        "-XX:+UseSerialGC",
        "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
        "-cp",
        f"{jars}/*",
        main_class,
        *arguments,
    ]


def one_line(pem: str) -> str:
    """Return PEM text as a continued line of a properties file has it: with blanks."""
    return " ".join(pem.split("\n"))


def write_jwks(path: Path) -> str:
    """Write the key of token() where a broker reads it; return the broker's setting."""
    key = load_pem_private_key(certificates.BROKER_KEY.encode(), None)
    assert isinstance(key, EllipticCurvePrivateKey)
    public = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(key.public_key()))
    path.write_text(json.dumps({"keys": [{**public, "kid": _KEY_ID, "alg": "ES256"}]}))
    return f"file://{path}"


def token(**claims: object) -> bytes:
    """Return a signed token for `USER`, good for an hour; None leaves a claim out."""
    now_s = int(time.time())
    all_claims = {"sub": USER, "iss": ISSUER, "aud": AUDIENCE}
    all_claims |= {"iat": now_s, "exp": now_s + 3600} | claims
    kept = {name: value for name, value in all_claims.items() if value is not None}
    headers = {"kid": _KEY_ID}
    return jwt.encode(kept, certificates.BROKER_KEY, "ES256", headers).encode()


class ApacheKafka:
    """One Kafka node in its own process; usable as a context manager.

    Args:
        data_dir: its log.dirs.
        heap: the size of the JVM's heap.
        properties: further settings, one a line.
        jars: where the Kafka is.
        jvm: further arguments of its JVM.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        heap: str = "1g",
        properties: str = "",
        jars: Path = JAVA_DIR,
        jvm: Sequence[str] = (),
    ) -> None:
        self.data_dir = data_dir
        self._jars = jars
        self._jvm = jvm
        self._further = properties
        self.log_path = data_dir.with_name(data_dir.name + ".kafka.log")
        self.bootstrap = ""
        self.listeners: dict[str, str] = {}  # address by protocol
        self._heap = heap
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Run the broker, and wait until it takes connections.

        A directory that has no meta.properties yet is formatted.
        """
        self.data_dir.mkdir(parents=True, exist_ok=True)
        properties = self._write_properties()
        if not (self.data_dir / "meta.properties").exists():
            self._format(properties)
        command = java_command(
            "kafka.Kafka", str(properties), heap=self._heap, jars=self._jars
        )
        command.remove("-XX:TieredStopAtLevel=1")
        command[1:1] = self._jvm
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.bootstrap = self.listeners["PLAINTEXT"]
        self._wait_until_it_answers()
        return self.bootstrap

    def _format(self, properties: Path) -> None:
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        subprocess.run(
            java_command(
                "kafka.tools.StorageTool",
                # With "=", as an id may begin with "-".
                *("format", f"--cluster-id={cluster_id}", "-c", str(properties)),
                jars=self._jars,
            ),
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def _write_properties(self) -> Path:
        if not self.listeners:  # a broker that starts again has the same addresses
            self.listeners = {
                name: f"127.0.0.1:{reusable_port()}" for name in PROTOCOLS
            }
        properties = self.data_dir.with_name(self.data_dir.name + ".properties")
        lines = [
            _PROPERTIES.format(
                listeners=",".join(f"{k}://{v}" for k, v in self.listeners.items()),
                protocol_map=",".join(f"{name}:{name}" for name in PROTOCOLS),
                controller_port=reusable_port(),
                data_dir=self.data_dir,
                key=one_line(certificates.BROKER_KEY),
                chain=one_line(certificates.BROKER),
                mechanisms=",".join(_MECHANISMS),
            )
        ]
        for listener in ("sasl_plaintext", "sasl_ssl"):
            for mechanism, module in _MECHANISMS.items():
                prefix = f"listener.name.{listener}.{mechanism.lower()}"
                lines.append(f"{prefix}.sasl.jaas.config={module};\n")
        # So short that a test sees sessions end.
        prefix = "listener.name.sasl_plaintext.scram-sha-256"
        lines.append(f"{prefix}.connections.max.reauth.ms=4000\n")
        properties.write_text("".join(lines) + self._further)
        return properties

    def _wait_until_it_answers(self) -> None:
        from confluent_kafka.admin import AdminClient

        assert self._process is not None
        admin = AdminClient(
            {"bootstrap.servers": self.bootstrap, "log_level": 0, "logger": None}
        )
        if not admin.list_topics(timeout=START_TIMEOUT_S).brokers:
            raise TimeoutError(f"Apache Kafka did not start; see {self.log_path}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def kill(self) -> None:
        """Kill the broker as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def wait(self) -> None:
        assert self._process is not None
        self._process.wait()

    def __enter__(self) -> ApacheKafka:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def kafka_to_ask(directory: Path) -> ApacheKafka:
    """Return a node with ACLs, on whose SASL_SSL listener the tokens of token() count.

    tests/compat/test_met_by_outsiders.py sets up a broker of ours in the same way.
    """
    url = write_jwks(directory / "jwks.json")
    properties = f"""\
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS
allow.everyone.if.no.acl.found=true
sasl.oauthbearer.jwks.endpoint.url={url}
sasl.oauthbearer.expected.issuer={ISSUER}
sasl.oauthbearer.expected.audience={AUDIENCE}
listener.name.sasl_ssl.oauthbearer.sasl.server.callback.handler.class=\
  {_MODULES}.oauthbearer.OAuthBearerValidatorCallbackHandler
"""
    allowed = f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={url}"
    return ApacheKafka(directory / "data", properties=properties, jvm=[allowed])


def main() -> None:
    if reason := fetch_java_tools():
        sys.exit(reason)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        if arguments[:1] == ["--test"]:
            with kafka_to_ask(Path(scratch)) as kafka:
                sys.exit(_run_tests(kafka, arguments[1:]))
        data_dir = Path(arguments[0] if arguments else f"{scratch}/data")
        with ApacheKafka(data_dir) as kafka:
            print("Apache Kafka is ready:")
            for name, value in _variables(kafka).items():
                print(f"{name}='{value}'")
            sys.stdout.flush()
            try:
                kafka.wait()
            except KeyboardInterrupt:
                print("stopping")


def _variables(kafka: ApacheKafka) -> dict[str, str]:
    return {
        BOOTSTRAP_VARIABLE: kafka.bootstrap,
        LISTENERS_VARIABLE: json.dumps(kafka.listeners, separators=(",", ":")),
    }


def _run_tests(kafka: ApacheKafka, arguments: list[str]) -> int:
    # In the order written and one by one: Kafka's broker learns of a change a moment
    # after its controller has answered.
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:randomly"]
    environment = os.environ | _variables(kafka)
    return subprocess.run([*command, *arguments], env=environment).returncode


if __name__ == "__main__":
    main()
