"""Who may ask the viewer, and what no one gets."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest
from tests.analysis.made_run import write_run
from tests.views.web.asking import CALM, SMALL, TOKEN, client_of

from sonde.errors import OptionError
from sonde.views.web.serve import is_loopback, names_of, take_place

ASKED = ("/", "/api/runs", "/plotly.js", "/assets/main.js", "/api/run/0-one", "/api/run/0-one/live", "/nowhere")
SECRET = "root:x:0:0 nobody may read this"


@pytest.mark.parametrize("path", ASKED)
def test_without_the_token_nothing_is_answered(folder, path):
    stranger = client_of(folder, token=None)
    for reply in ({}, {"x-sonde-token": "wrong"}, {"authorization": f"Bearer {TOKEN}x"}, {"cookie": "sonde=1; =; ,;"}):
        answer = stranger.get(path, headers=reply)
        assert answer.status_code == 401
        assert "sonde view" in answer.text
    assert stranger.get(path, params={"token": TOKEN[:-1]}).status_code == 401


def test_a_token_in_the_address_becomes_a_cookie_that_scripts_cannot_read(folder):
    stranger = client_of(folder, token=None)
    answer = stranger.get("/", params={"token": TOKEN, "poll": "1"})
    assert answer.status_code == 303
    assert answer.headers["location"] == "./?poll=1"
    assert TOKEN not in answer.headers["location"]
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert stranger.get("/").status_code == 200  # the client keeps the cookie
    assert stranger.get("/api/runs").status_code == 200


def test_the_cookie_has_a_value_of_its_own_that_opens_this_server_and_no_other(folder):
    here, elsewhere = client_of(folder, token=None), client_of(folder, token=None)
    here.get("/", params={"token": TOKEN})
    name, _, value = here.cookie.partition("=")
    assert name == "sonde-7860"  # cookies do not know ports
    assert len(value) >= 32
    assert TOKEN not in here.cookie
    assert here.get("/api/runs").status_code == 200
    assert elsewhere.get("/api/runs", headers={"cookie": here.cookie}).status_code == 401
    assert here.get("/api/runs", headers={"cookie": f"sonde-7861={value}"}).status_code == 401
    assert here.get("/api/runs", headers={"cookie": f"{name}={TOKEN}"}).status_code == 401


def test_the_token_works_as_a_header_for_programs(folder):
    stranger = client_of(folder, token=None)
    assert stranger.get("/api/runs", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert stranger.get("/api/runs", params={"token": TOKEN}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", "10.0.0.7", "", "[", "localhost@evil"],
)
def test_a_foreign_host_is_refused_even_with_the_token(client, host):
    assert client.get("/api/runs", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost", "localhost:9999", "127.0.0.1", "[::1]:7860", "LOCALHOST"])
def test_names_of_this_machine_are_taken(client, host):
    assert client.get("/api/runs", headers={"host": host}).status_code == 200


def test_behind_every_address_any_number_is_taken_and_any_name_is_not(folder):
    client = client_of(folder, hosts=names_of("0.0.0.0", ["viewer.lab"]))
    for host, status in (("10.0.0.7:7860", 200), ("[fe80::1]:7860", 200), ("viewer.lab", 200), ("evil.example", 421)):
        assert client.get("/api/runs", headers={"host": host}).status_code == status


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1.evil.example", "file://"])
def test_a_foreign_origin_is_refused_even_with_the_token(client, origin):
    assert client.get("/api/runs", headers={"origin": origin}).status_code == 403


def test_our_own_origin_is_taken(client):
    assert client.get("/api/runs", headers={"origin": "http://localhost:7860"}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(client, method):
    assert client.request(method, "/api/runs").status_code == 405


@pytest.mark.parametrize("path", ASKED[:5])
def test_every_answer_forbids_foreign_scripts_and_is_not_guessed_at(client, path):
    headers = client.get(path).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../app.py",
        "/assets/%2e%2e/app.py",
        "/assets/..%2fapp.py",
        "/assets//etc/passwd",
        "/assets/%00",
        "/api/run/..",
        "/api/run/0-..~2Foutside",
        "/api/run/0-..%2Foutside",
        "/api/run/0-%2Fetc",
        "/api/run/99-one",
        "/api/run/x",
        "/api/run/0-one/trace/..%2Frun.json",
        "/api/run/0-one/trace/%2E%2E",
        "/api/run/0-one/trace-summary?name=../run.json",
        "/api/run/0-one/trace-summary?name=%00",
        "/api/run/0-one/trace-summary",
        "/api/run/0-one/figure/__class__",
        "/api/nowhere",
        "/nowhere",
    ],
)
def test_what_is_not_there_or_not_ours_is_not_found(client, path):
    answer = client.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]


def test_links_that_lead_out_of_the_folder_are_not_followed(tmp_path):
    root, outside = tmp_path / "runs", tmp_path / "outside"
    write_run(outside, CALM)
    (tmp_path / "secret.json").write_text(SECRET)
    write_run(root / "honest", SMALL)
    (root / "linked").symlink_to(outside, target_is_directory=True)
    write_run(root / "sly", SMALL)
    (root / "sly" / "events.jsonl").unlink()
    (root / "sly" / "events.jsonl").symlink_to(tmp_path / "secret.json")
    (root / "honest" / "traces").mkdir()
    (root / "honest" / "traces" / "profile.json").symlink_to(tmp_path / "secret.json")
    (root / "honest" / "traces" / "ring.json").symlink_to(root / "honest" / "traces" / "ring.json")
    client = client_of(root)
    assert {run["name"] for run in client.get("/api/runs").json()["runs"]} == {"honest", "sly"}
    assert client.get("/api/run/0-linked").status_code == 404
    answer = client.get("/api/run/0-sly")
    assert answer.status_code == 404
    assert "leads out" in answer.json()["error"]
    for path in ("trace/profile.json", "trace-summary?name=profile.json", "trace/ring.json"):
        answer = client.get(f"/api/run/0-honest/{path}")
        assert answer.status_code == 404
        assert SECRET not in answer.text
    assert client.get("/api/run/0-honest/traces").json() == {"traces": []}


def test_an_unreadable_folder_is_skipped(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    (tmp_path / "shut").mkdir(mode=0)
    assert client_of(tmp_path).get("/api/runs").json()["runs"] == []


def test_a_token_that_can_be_guessed_is_refused():
    for token in ("short", "with\nnewline-and-more-signs", "ünïcödé-ünïcödé-ünïcödé"):
        with pytest.raises(OptionError, match="guessed"):
            take_place(token=token)


def test_two_places_have_two_ports_and_two_tokens():
    one, two = take_place(port=0), take_place(port=0)
    with one.socket, two.socket:
        assert one.port != two.port
        assert one.token != two.token
        assert len(one.token) >= 32
        with pytest.raises(OptionError, match=r"--port"):
            take_place(port=one.port)


def test_answers_are_sent_at_once():
    sends_at_once = []

    class Asked(asyncio.Protocol):
        def connection_made(self, transport):
            asked = transport.get_extra_info("socket")
            sends_at_once.append(bool(asked.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            transport.close()

    async def ask_once():
        place = take_place(port=0)
        server = await asyncio.get_running_loop().create_server(Asked, sock=place.socket)
        reader, writer = await asyncio.open_connection(place.host, place.port)
        assert await reader.read() == b""
        for closing in (writer, server):
            closing.close()
            await closing.wait_closed()

    asyncio.run(ask_once())
    assert sends_at_once == [True]


@pytest.mark.parametrize(
    ("host", "alone"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("node7", False)]
)
def test_only_loopback_is_loopback(host, alone):
    assert is_loopback(host) is alone
