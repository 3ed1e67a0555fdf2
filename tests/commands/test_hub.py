"""Pushing to a hub and fetching from it, against a stand-in on this machine that speaks its API."""

import base64
import json
import threading
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants as hub
import pytest

from dzrobot.cli import main
from dzrobot.commands.download import PUBLISHED

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Keeps what is committed in ``server.files``: (kind and name, path) -> bytes."""

    def log_message(self, *_):
        pass

    def reply(self, value, status=200, **headers):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = self.path.strip("/").split("/")
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            self.server.private = asked.get("private") or asked.get("visibility") == "private"
            kind = "datasets/" if asked.get("type") == "dataset" else ""
            name = f"{kind}{asked['organization']}/{asked['name']}"
            self.reply({"url": f"http://{self.headers['Host']}/{name}"})
        elif "preupload" in parts:
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for f in json.loads(body)["files"]]  # fmt: skip
            self.reply({"files": files})
        elif "commit" in parts:
            repo = "/".join(parts[1:4])
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.files[repo, line["value"]["path"]] = content
            kind = "" if parts[1] == "models" else "datasets/"
            name = f"{kind}{'/'.join(parts[2:4])}/commit/{COMMIT}"
            self.reply({"success": True, "commitUrl": f"http://{self.headers['Host']}/{name}",
                        "commitOid": COMMIT})  # fmt: skip
        else:
            self.reply({"errors": [], "warnings": []})

    def do_GET(self):
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[0] == "api":
            held = [path for repo, path in self.server.files if repo == "/".join(parts[1:4])]
            if not held:
                self.reply({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
                return
            if "tree" in parts:
                self.reply([
                    {"type": "file", "path": path, "size": len(self.server.files[repo, path]),
                     "oid": sha1(path.encode()).hexdigest()}
                    for repo, path in self.server.files
                ])  # fmt: skip
                return
            siblings = [{"rfilename": path} for path in held]
            self.reply({"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": siblings})
            return
        kind = parts.pop(0) if parts[0] == "datasets" else "models"
        content = self.server.files["/".join([kind, *parts[:2]]), "/".join(parts[4:])]
        self.reply(content, ETag=f'"{sha1(content).hexdigest()}"', X_Repo_Commit=COMMIT)

    def do_HEAD(self):
        self.do_GET()


@pytest.fixture
def server(monkeypatch, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files = {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(hub, "ENDPOINT", address)
    monkeypatch.setattr(
        hub, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield server
    server.shutdown()
    server.server_close()


def written(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


EXPORT = {"config.json": "{}", "README.md": "# card", "experiment_cfg/metadata.json": "{}"}


def test_an_export_goes_to_the_hub_and_comes_back(server, tmp_path, capsys):
    folder = written(tmp_path / "export", {**EXPORT, "weights.partial": "unfinished"})
    assert main(["push", str(folder), "lab/policy"]) == 0
    assert capsys.readouterr().out.strip().endswith("/lab/policy")
    assert server.private is True
    assert {path for _, path in server.files} == EXPORT.keys()
    assert main(["download", "lab/policy", "--to", str(tmp_path / "back")]) == 0
    for name, text in EXPORT.items():
        assert (tmp_path / "back" / name).read_text() == text


def test_a_dataset_gets_a_card(server, tmp_path):
    folder = written(tmp_path / "data", {"meta/info.json": "{}", "data/a.parquet": "rows"})
    assert main(["push", str(folder), "lab/pick", "--public"]) == 0
    assert not server.private
    files = {path: content for (_, path), content in server.files.items()}
    assert files.keys() == {"meta/info.json", "data/a.parquet", "README.md"}
    assert b"tags: [LeRobot" in files["README.md"]
    command = ["download", "lab/pick", "--dataset", "--to", str(tmp_path / "back")]
    assert main(command) == 0
    assert (tmp_path / "back/data/a.parquet").read_text() == "rows"


def test_what_is_not_there_is_one_message(server, tmp_path, capsys):
    assert main(["download", "lab/nothing", "--to", str(tmp_path / "x")]) == 2
    assert "HF_ENDPOINT" in capsys.readouterr().err
    assert main(["download", "nothing"]) == 2
    assert "lists the published ones" in capsys.readouterr().err
    assert main(["push", str(tmp_path), "lab/policy"]) == 2
    assert "neither an exported checkpoint" in capsys.readouterr().err


def test_published_ids_are_listed_whole_with_their_needs(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["download"]) == 0
    said = capsys.readouterr().out
    assert set(PUBLISHED) <= set(said.splitlines())
    assert "46 GB" in said
