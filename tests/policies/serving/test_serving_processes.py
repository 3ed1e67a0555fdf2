"""The command in a process of its own, and TLS: what a lab starts, and how it ends."""

import datetime
import ipaddress
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from serving_peers import MINI, Remembering, serving

from dzrobot.cli import main
from dzrobot.errors import ServerError
from dzrobot.policies.base import blank
from dzrobot.policies.serving.connection import ConnectOptions
from dzrobot.policies.serving.remote_policy import RemotePolicy

HERE = Path(__file__).parent
QUICK = ConnectOptions(connect_s=60, first_s=60, later_s=60)
GATED = """
from pathlib import Path
from time import sleep

from serving_peers import Remembering


class Gated(Remembering):
    def plan(self, asks):
        if Path("closed").exists():
            Path("begun").touch()
        while Path("closed").exists():
            sleep(0.01)
        return super().plan(asks)
"""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Return the files of a self-signed certificate of this machine, and of its key."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "policy server")])
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(made.public_bytes(pem))
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(pem, *private))
    return folder / "cert.pem", folder / "key.pem"


def seen():
    return {**blank(MINI, None), MINI.language: "lift the cube"}


def test_tls_serves_those_who_trust_its_certificate_and_nobody_else(certificate, monkeypatch):
    cert, key = map(str, certificate)
    with serving(Remembering(MINI), certificate=cert, private_key=key) as server:
        port = server.ports[0]
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        with pytest.raises(ServerError, match=r"self-signed.*SSL_CERT_FILE"):
            RemotePolicy(f"wss://127.0.0.1:{port}", MINI, options=QUICK)
        monkeypatch.setenv("SSL_CERT_FILE", cert)
        with pytest.raises(ServerError, match=r"not valid for 'localhost'.*host name that"):
            RemotePolicy(f"wss://localhost:{port}", MINI, options=QUICK)
        with pytest.raises(ServerError, match="no connection"):
            RemotePolicy(f"ws://127.0.0.1:{port}", MINI, options=ConnectOptions(connect_s=0.5))
        client = RemotePolicy(f"wss://127.0.0.1:{port}", MINI, options=QUICK)
        assert client.act(seen()).shape == (7,)
        client.close()


def test_a_certificate_with_the_key_of_another_is_one_message(certificate, tmp_path, capsys):
    other = ec.generate_private_key(ec.SECP256R1())
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    wrong = tmp_path / "other.pem"
    wrong.write_bytes(other.private_bytes(serialization.Encoding.PEM, *private))
    files = ["--cert", str(certificate[0]), "--key", str(wrong)]
    assert main(["serve", "--port", "0", "--array-port", "0", *files]) == 2
    assert "TLS with" in capsys.readouterr().err


def test_sigterm_lets_the_command_finish_what_has_begun(tmp_path):
    (tmp_path / "gated.py").write_text(GATED)
    paths = os.pathsep.join([str(tmp_path), str(HERE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "dzrobot", "serve", "gated:Gated", "--embodiment", MINI.tag]
    with subprocess.Popen(
        [*command, "--port", "0", "--array-port", "0"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        said = "".join(iter(process.stdout.readline, "Ctrl-C stops it.\n"))
        client = RemotePolicy(re.findall(r"ws://\S+", said)[0], MINI, options=QUICK)
        (tmp_path / "closed").touch()
        plans = []
        asking = threading.Thread(target=lambda: plans.append(client.infer(seen())["actions"]))
        asking.start()
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(ServerError, match="shutting down"):
            RemotePolicy(re.findall(r"ws://\S+", said)[0], MINI, options=_IMPATIENT)
        (tmp_path / "closed").unlink()
        asking.join(60)
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in log
    lone = Remembering(MINI)
    lone.reset("lone")
    np.testing.assert_array_equal(plans, [lone.infer_batch([seen()], ["lone"])[0]["actions"]])


_IMPATIENT = ConnectOptions(connect_s=0.5)
