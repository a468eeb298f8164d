"""Endpoint, region, profile and the like of a bucket: in the query of its URL, in StorageOptions, in flags."""

import copy
import json
import logging
import pathlib
import pickle
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from absl import flags as absl_flags
from etils import epath

import epochckpt as ec
from epochckpt.cli import main
from epochckpt.errors import AccessError, EpochCheckpointError, InvalidArgumentError, StorageError
from epochckpt.jobs import stop
from epochckpt.options import BucketSettings
from epochckpt.orbax import item_files
from epochckpt.storage import File, Store, open_file, open_store, path_text, plain, with_settings
from epochckpt.storage.object_store import ObjectStore
from epochckpt.testing import FaultyStore, StoreCall
from tests.support.gcs_server import Handler, Server
from tests.support.job_runs import reading_job
from tests.support.object_servers import BUCKET, Bucket, Fault

Save, Options = ocp.args.StandardSave, ocp.CheckpointManagerOptions
SECRET = "hush-hush"


@pytest.fixture
def query(cloud: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    """What reaches the server; the environment names none."""
    for name in ("STORAGE_EMULATOR_HOST", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    return f"endpoint={cloud.proxy.url}&{'anonymous=true' if cloud.scheme == 'gs' else 'region=us-east-1'}"


def save(url: str, *epochs: int, **arguments: Any) -> None:
    with ec.CheckpointManager(url, **arguments) as manager:
        for epoch in epochs:
            manager.save(epoch, args=Save({"w": jnp.arange(4.0) + epoch}), metrics={"loss": 1.0 / epoch})


@pytest.mark.slow
def test_a_run_lives_in_a_url_with_a_query(
    cloud: Bucket, query: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Managers, handlers, evaluators, copies, export, import: none needs anything else, and none tells the query."""
    caplog.set_level(logging.INFO)
    plain_url = cloud.new_url()
    url, other = f"{plain_url}?{query}", f"{cloud.new_url()}/?{query}"
    beside = ec.metadata.JsonMetadataHandler(f"{plain_url}-beside/last.json?{query}")
    stopped = ec.stop.file_exists(f"{plain_url}-beside/last.json?{query}")
    seen = stop.Context(epoch=1, metrics={}, workspace={}, elapsed_secs=0.0, total_secs=0.0)
    for epoch, handler in ((1, ec.metadata.JsonMetadataHandler()), (2, beside)):
        assert not stopped(seen)
        save(url, epoch, metadata_handler=handler)
        assert handler.last_epoch() == epoch
    assert stopped(seen)
    database = ec.metadata.SqliteMetadataHandler(tmp_path / "runs.db")
    ec.CheckpointManager(url, metadata_handler=database).close()
    database.set_params(f"{url}&retries=1", "x", ["n0"])
    assert [(run.name, run.db_prefix) for run in database.runs()] == [(plain_url, plain_url)]
    assert list(ec.follow(url, timeout_secs=0)) == [1, 2]
    ec.attach_metrics(url, 2, {"accuracy": 0.5}, "evaluator")
    with ec.CheckpointManager(url) as manager:
        assert str(manager.root) == plain_url == str(manager.directory)
        assert manager.metrics(2)["accuracy"] == 0.5
        ec.LocalSession().run(ec.CopyUpload(other).build(2, manager))
        with pytest.raises(EpochCheckpointError, match="is the checkpoint directory itself"):
            ec.LocalSession().run(ec.CopyUpload(f"{url}&retries=1").build(2, manager))
        np.testing.assert_array_equal(manager.restore(2, directory=other)["w"], np.arange(4.0) + 2)
    ec.export(other, 2, tmp_path / "out", "safetensors")
    (file,) = (tmp_path / "out").glob("**/*.safetensors")
    assert ec.import_(file, f"{cloud.new_url()}?{query}", 0).state == "committed"

    def contents(folder: str) -> bytes:
        store, found = open_store(f"{plain_url}?{query}"), b""
        for entry in store.list(folder):
            path = f"{folder}/{entry.name}" if folder else entry.name
            found += contents(path) if entry.is_folder else store.read(path, limit_bytes=10**6)
        return found

    assert plain_url.encode() in contents("")
    assert b"endpoint" not in contents("")
    assert "endpoint" not in caplog.text


@pytest.mark.parametrize("server", ["gs", pytest.param("s3", marks=pytest.mark.slow)], indirect=True)
def test_every_look_takes_a_url_with_a_query(
    cloud: Bucket, query: str, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    """Notebook and command; also the folder of one epoch. Neither shows the query."""
    name = cloud.new_url()
    url = f"{name}?{query}"
    save(url, 1, 2)
    run = ec.inspect(url)
    assert (run.directory, [row.epoch for row in run.epochs()]) == (name, [1, 2])
    assert "endpoint" not in repr(run) + run.to_html() + run[2].to_html()
    one = ec.inspect(epath.Path(f"{name}/2/?{query}"))
    assert (one.directory, [row.epoch for row in one.epochs()]) == (f"{name}/2", [2])
    assert run.diff(1, 1, directory=f"{url}&retries=2").rows
    calls = [["ls"], ["show"], ["verify"], ["diff", "1", "2"], ["stat", "2"], ["tree", "2"], ["gc"], ["ls", "--json"]]
    calls += [["watch", "--until=2"], ["export", "2", str(tmp_path / "out"), "--format=safetensors"]]
    for call in calls:
        code = main.main([call[0], url, *call[1:]])
        said = capsys.readouterr()
        assert code == (1 if call[0] == "diff" else 0), (call, said)
        assert "endpoint" not in said.out + said.err, call
    assert main.main(["show", name, "2", "--store", query]) == 0
    assert main.main(["diff", name, "1", "2", "--other", name, "--store", query]) == 1


@pytest.mark.parametrize("endpoint", ["", "http://localhost:9000", "http://127.0.0.1:1"])
def test_tensorstore_has_the_settings_of_the_bucket_and_asks_no_other_server(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For arrays of stock Orbax: where it cannot be told the server, it is given a copy."""
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "http://localhost:9000/")
    asked = {"endpoint": endpoint or None, "anonymous": True, "retries": 3, "first_retry_secs": 0.5, "concurrency": 7}
    store = FaultyStore(open_store("gs://bucket/run", settings=asked))
    copied = list[str]()

    def hold_nothing(call: StoreCall) -> list[File]:
        copied.append(call.path)
        return []

    store.faults.instead(Store.files, hold_nothing)
    found = item_files.TensorFiles(store, "1/state")
    ts.Context(found.resources(128))
    assert found.resources(128)["gcs_request_concurrency"] == {"limit": 7}
    assert found.resources(128)["gcs_request_retries"] == {
        "max_retries": 3,
        "initial_delay": "0.5s",
        "max_delay": "8s",
    }
    direct = endpoint == "http://localhost:9000"
    assert (found.kvstore()["driver"], copied) == (("gcs", []) if direct else ("file", ["1/state"]))
    payer = open_store("gs://bucket/run?requester_pays=project")
    assert item_files.TensorFiles(payer, "1").resources(9)["gcs_user_project"] == {"project_id": "project"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gs://bucket/run", "--store", f"secret={SECRET}"], "secret"),
        (["gs://bucket/run", "--store", "regoin=eu"], "regoin"),
        (["s3://bucket/run", "--store", f"endpoint={SECRET}"], "endpoint is wrong"),
        (["gs://bucket/run", "--store", "region=eu"], "region is no setting of gs://"),
        (["/data/run", "--store", "retries=1"], "--store applies to bucket URLs only; /data/run is a local path"),
    ],
)
def test_settings_of_the_command_are_checked(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["ls", *words]) == 2
    out = capsys.readouterr()
    assert said in out.err
    assert SECRET not in out.out + out.err


@pytest.mark.parametrize("server", ["gs", pytest.param("s3", marks=pytest.mark.slow)], indirect=True)
def test_flags_and_a_runner_reach_a_bucket(cloud: Bucket, query: str) -> None:
    """By the directory's query, or by a flag of its own; an evaluator with the same flags, too."""
    name, totals = cloud.new_url(), list[Any]()
    for epochs, words in ((2, [f"--ckpt_directory={name}?{query}"]), (3, [f"--ckpt_directory={name}"])):
        program = absl_flags.FlagValues()
        flags = ec.flags.define("ckpt", program)
        program(["train.py", *words, *([f"--ckpt_store={query}"] if epochs == 3 else [])])
        runner = flags.runner(reading_job(epochs, totals))
        assert runner(ec.LocalSession()) == epochs
        runner.checkpoint_manager.close()
        assert list(flags.follow(timeout_secs=0)) == list(range(epochs + 1))
        assert "endpoint" in flags.flagfile()


def test_options_reach_a_bucket_and_a_url_comes_first(cloud: Bucket, query: str) -> None:
    """StorageOptions hold for whatever the manager opens; the environment comes last."""
    name, other = cloud.new_url(), cloud.new_url()
    storage = ec.StorageOptions(store=BucketSettings.of(query, "test"))
    save(name, 1, storage=storage)
    save(other, 2, storage=storage)
    with ec.CheckpointManager(name, storage=storage) as manager:
        np.testing.assert_array_equal(manager.restore(2, directory=other)["w"], np.arange(4.0) + 2)
        assert manager.address == f"{name}?{query}"
    wrong = ec.StorageOptions(store={**storage.store, "endpoint": "http://127.0.0.1:1", "retries": 0})
    with pytest.raises(StorageError):
        ec.CheckpointManager(name, storage=wrong)
    with ec.CheckpointManager(f"{name}?endpoint={cloud.proxy.url}", storage=wrong) as manager:
        assert manager.all_steps() == [1]


@pytest.mark.parametrize("server", ["gs"], indirect=True)
def test_a_mirror_is_found_again_by_who_looks(cloud: Bucket, query: str, tmp_path: pathlib.Path) -> None:
    """The directory knows how its mirror is reached, whether the URL said so or the options."""
    one, other = cloud.new_url(), cloud.new_url()
    by_options = ec.StorageOptions(mirror=other, store=BucketSettings.of(query, "test"))
    by_url = ec.StorageOptions(mirror=f"{one}?{query}")
    for url, storage in ((one, by_url), (other, by_options)):
        directory = tmp_path / url.rpartition("/")[2]
        save(str(directory), 1, storage=storage)
        seen = ec.inspect(directory).overview()
        assert (seen.mirror, seen.problems, [row.tier for row in seen.epochs]) == (url, {}, ["both"])


@pytest.mark.slow
@pytest.mark.parametrize("where", ["url", "environment"])
def test_an_endpoint_may_have_a_path(where: str, cloud: Bucket, query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that serves several things, or several stores."""
    name, server = cloud.new_url(), f"{cloud.proxy.url}/storage/v1"
    url = f"{name}?{query.replace(cloud.proxy.url, f'{server}/')}"
    if where == "environment":
        monkeypatch.setenv("STORAGE_EMULATOR_HOST" if cloud.scheme == "gs" else "AWS_ENDPOINT_URL", server)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        url = name
    monkeypatch.setattr(cloud.proxy, "prefix", "/storage/v1")
    save(url, 1, 2)
    store = open_store(url)
    assert store.endpoint == server
    assert main.main(["verify", url]) == 0
    with ec.CheckpointManager(url) as manager:
        np.testing.assert_array_equal(manager.restore(None)["w"], np.arange(4.0) + 2)
        manager.delete(1)
    assert not store.exists("1")


def test_two_endpoints_are_two_directories(cloud: Bucket, query: str) -> None:
    name = cloud.new_url()
    one, same = open_store(f"{name}?{query}"), open_store(f"{name}/?{query}&retries=1&concurrency=2")
    other = open_store(f"{name}?{query.replace(cloud.proxy.url, 'http://127.0.0.1:1')}")
    assert one.root == same.root == other.root == name
    assert one.is_same(same)
    assert not one.is_same(other)
    assert (one.concurrency, same.concurrency) == (16, 2)


@pytest.mark.parametrize("server", ["gs"], indirect=True)
def test_retries_are_as_many_and_as_long_as_asked(cloud: Bucket, query: str) -> None:
    """The pauses are those that were asked for, and no request too many is made."""
    waited: list[float] = []
    url = cloud.new_url()
    for asked, pauses in (
        ("retries=0", []),
        ("retries=4&first_retry_secs=0.01&longest_retry_secs=50ms", [0.01, 0.02, 0.04, 0.05]),
        ("retries=3&first_retry_secs=20s", [20.0, 20.0, 20.0]),
        ("longest_retry_secs=0.1", [0.1] * 8),
    ):
        store = ObjectStore(f"{url}?{query}&{asked}", pause=waited.append)
        cloud.proxy.decide = lambda request: Fault(status=503)
        with cloud.proxy.counted() as counts, pytest.raises(StorageError, match="503"):
            store.read("a", limit_bytes=1)
        assert counts == {"GET": len(pauses) + 1}
        assert len(waited) == len(pauses)
        # By chance shorter, so that thousands of nodes do not come back together.
        assert all(pause / 2 <= found <= pause for found, pause in zip(waited, pauses, strict=True))
        waited.clear()


def make_public(cloud: Bucket, url: str) -> None:
    """Lets everybody read what is there."""
    import boto3

    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
    client = boto3.session.Session().client("s3", endpoint_url=cloud.proxy.url, **keys)
    for found in client.list_objects_v2(Bucket=BUCKET, Prefix=url.rpartition("/")[2])["Contents"]:
        client.put_object_acl(Bucket=BUCKET, Key=found["Key"], ACL="public-read")


@pytest.mark.parametrize("server", ["gs", pytest.param("s3", marks=pytest.mark.slow)], indirect=True)
def test_nobody_is_asked_for_credentials(cloud: Bucket, query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a public bucket: reads carry no signature and no token."""
    url = cloud.new_url()
    save(f"{url}?{query}", 1)
    if cloud.scheme == "s3":
        make_public(cloud, url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    cloud.proxy.requests.clear()
    settings = {**BucketSettings.of(query, "test"), "anonymous": True}
    read = ec.CheckpointManager(url, options=Options(read_only=True), storage=ec.StorageOptions(store=settings))
    with read as manager:
        np.testing.assert_array_equal(manager.restore(1)["w"], np.arange(4.0) + 1)
    assert {request.kind for request in cloud.proxy.requests} >= {"GET"}
    assert not any("authorization" in request.headers for request in cloud.proxy.requests)


def test_who_reads_pays(cloud: Bucket, query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request names who: the asker on S3, a project on Google's."""
    if cloud.scheme == "gs":
        header, payer = "x-goog-user-project", "my-project"
        url = (
            f"{cloud.new_url()}?requester_pays={payer}"  # an emulator by the environment: a settings' one has accounts
        )
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.proxy.url)
    else:
        header, payer = "x-amz-request-payer", "requester"
        url = f"{cloud.new_url()}?{query}&requester_pays=true"
    save(url, 1)
    assert {request.headers.get(header) for request in cloud.proxy.requests} == {payer}


PROFILE = """
[profile mine]
region = eu-west-3
endpoint_url = {url}
"""


@pytest.mark.parametrize("server", ["s3"], indirect=True)
@pytest.mark.parametrize("where", ["profile", "services", "url"])
def test_a_profile_brings_credentials_region_and_endpoint(
    where: str, cloud: Bucket, query: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `~/.aws`; in a section of services, too. The URL's own come first."""
    text = PROFILE.format(url=cloud.proxy.url if where != "url" else "http://127.0.0.1:1")
    if where == "services":
        text = text.replace("endpoint_url =", "services = local\n[services local]\ns3 =\n  endpoint_url =")
    (tmp_path / "config").write_text(text)
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = of-mine\naws_secret_access_key = hidden\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    url = f"{cloud.new_url()}?profile=mine"
    region = "eu-west-3"
    if where == "url":
        url, region = f"{url}&endpoint={cloud.proxy.url}&region=eu-west-2", "eu-west-2"
    open_store(url).create("a", b"1")
    (request,) = cloud.proxy.requests
    assert "Credential=of-mine/" in request.headers["authorization"]
    assert f"/{region}/s3/" in request.headers["authorization"]
    with pytest.raises(InvalidArgumentError, match="nobody"):
        open_store(f"{cloud.new_url()}?profile=nobody")
    (tmp_path / "config").write_text("[profile empty]\nregion = eu-west-3\n")
    with pytest.raises(AccessError, match=r"'empty' in ~/\.aws has no credentials"):
        open_store(f"{cloud.new_url()}?profile=empty")


@pytest.mark.parametrize("server", ["s3"], indirect=True)
@pytest.mark.parametrize("region", ["", "&region=us-east-1"])
def test_a_server_that_wants_the_bucket_in_the_name_of_its_host(
    cloud: Bucket, query: str, region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`addressing=virtual`: a run saves, is looked at and is rolled back. Other requests are refused there."""
    cloud.proxy.host = "storage.test"
    monkeypatch.setenv("http_proxy", cloud.proxy.url)
    url = f"{cloud.new_url()}?endpoint=http://storage.test{region}"
    virtual = f"{url}&addressing=virtual"
    save(virtual, 1, 2)
    with ec.CheckpointManager(virtual) as manager:
        np.testing.assert_array_equal(manager.restore(2)["w"], np.arange(4.0) + 2)
        manager.rollback_to(1)
    assert [row.epoch for row in ec.inspect(virtual).epochs()] == [1]
    for other in (url, f"{url}&addressing=path"):
        with pytest.raises(StorageError, match=r"storage\.test/bucket/.*400 Bad Request"):
            open_store(f"{other}&retries=0").exists("a")


class _Exchange(Handler):
    """Google's exchange of tokens: what another cloud says of its account, for one of Google's."""

    def do_POST(self) -> None:
        self.server.asked.append(urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode()))
        kinds = {"issued_token_type": "urn:ietf:params:oauth:token-type:access_token", "token_type": "Bearer"}
        token = {"access_token": "of-google", "expires_in": 3600, **kinds}
        answer = json.dumps({"error": "invalid_grant"} if self.server.refuses else token).encode()
        self.send_response(400 if self.server.refuses else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


@pytest.fixture
def exchange(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Credentials of another cloud's account, and the server that exchanges them."""
    server: Any = Server(("127.0.0.1", 0), _Exchange)
    server.asked, server.refuses = [], False
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    (tmp_path / "subject").write_text("of-another-cloud")
    account = {
        "type": "external_account",
        "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/pool/providers/it",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": f"http://127.0.0.1:{server.server_address[1]}/v1/token",
        "credential_source": {"file": str(tmp_path / "subject")},
    }
    (tmp_path / "account.json").write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "project")
    try:
        yield server
    finally:
        server.stop()
        thread.join()


@pytest.mark.parametrize("server", ["gs"], indirect=True)
def test_an_account_of_another_cloud_is_one_of_googles(cloud: Bucket, query: str, exchange: Any) -> None:
    """Through google-auth: its token is asked for once."""
    pytest.importorskip("google.auth")
    store = open_store(f"{cloud.new_url()}?endpoint={cloud.proxy.url}")
    store.create("a", b"1")
    assert store.read("a", limit_bytes=1) == b"1"
    assert {request.headers["authorization"] for request in cloud.proxy.requests} == {"Bearer of-google"}
    assert exchange.asked[0]["subject_token"] == ["of-another-cloud"]
    assert len(exchange.asked) <= 3  # one for each client of small, large and streamed requests


@pytest.mark.parametrize("server", ["gs"], indirect=True)
def test_credentials_that_are_refused_are_an_error_at_once(cloud: Bucket, query: str, exchange: Any) -> None:
    """No request reaches the store, and none is repeated."""
    pytest.importorskip("google.auth")
    exchange.refuses = True
    url = cloud.new_url()
    with pytest.raises(AccessError, match=f"{url}: found no credentials: .*invalid_grant"):
        open_store(f"{url}?endpoint={cloud.proxy.url}").exists("a")
    assert not cloud.proxy.requests


@pytest.mark.parametrize("server", ["gs"], indirect=True)
def test_without_google_auth_it_is_said_what_works(
    cloud: Bucket, query: str, exchange: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "google.auth", None)
    url = f"{cloud.new_url()}?endpoint={cloud.proxy.url}&retries=7"
    with pytest.raises(InvalidArgumentError, match=r"kind 'external_account', which needs google-auth: pip install"):
        open_store(url)
    open_store(f"{url}&anonymous=true").create("a", b"1")


WRONG = {
    "endpiont=http://x": "there is no setting 'endpiont'; near: 'endpoint'",
    "endpoint=x": "endpoint is wrong; expected http://host:port",
    f"endpoint=http://me:{SECRET}@host": "endpoint is wrong; expected http://host:port",
    f"aws_secret_access_key={SECRET}": "is a secret and no setting.*environment",
    f"X-Amz-Signature={SECRET}": "is a secret and no setting.*environment",
    SECRET: "expected each setting once, as name=value",
    "retries=1&retries=2": "expected each setting once",
    "retries=-1": "retries is wrong; expected an integer from 0 to 100",
    "concurrency=0": "concurrency is wrong",
    "first_retry_secs=2h": "first_retry_secs is wrong; expected seconds",
    "first_retry_secs=2&longest_retry_secs=1": "first_retry_secs=2 is above longest_retry_secs=1",
    "anonymous=maybe": "anonymous is wrong; expected true or false",
    "anonymous=true&requester_pays=project": "anonymous contradicts requester_pays",
}


@pytest.mark.parametrize("query", WRONG)
def test_wrong_settings_are_refused_without_a_word_of_values(query: str) -> None:
    """The same in a URL and in StorageOptions, in flags and commands."""
    calls: list[Any] = [
        lambda: open_store(f"gs://{BUCKET}/run?{query}"),
        lambda: ec.StorageOptions(store=query),  # type: ignore[arg-type]
        lambda: ec.flags.Settings(store=query),
        lambda: ec.CopyUpload(f"gs://{BUCKET}/run?{query}"),
        lambda: ec.metadata.JsonMetadataHandler(f"gs://{BUCKET}/run/x.json?{query}"),
        lambda: ec.inspect(f"gs://{BUCKET}/run?{query}"),
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError, match=WRONG[query]) as caught:
            call()
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("gs://b/run?region=x", "region is no setting of gs://"),
        ("gs://b/run?profile=x", "profile is no setting of gs://"),
        ("memory://b/run?endpoint=http://x", "endpoint is no setting of memory://"),
        ("gs://b/run?requester_pays=true", "expected the project that pays"),
        ("s3://b/run?requester_pays=project", "expected true or false"),
        (f"gs://me:{SECRET}@b/run", "gs://b/run' names no store"),
        (f"ftp://b/run?{SECRET}", "ftp://b/run' names no store"),
    ],
)
def test_what_a_store_has_no_use_for_is_refused(url: str, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said) as caught:
        open_store(url)
    assert SECRET not in str(caught.value)


def test_settings_are_values() -> None:
    """Frozen, equal by content, and whole after copies of any kind and as text."""
    settings = BucketSettings.of({"endpoint": "http://h:1/", "retries": "3", "anonymous": "TRUE", "region": None}, "x")
    assert settings == {"endpoint": "http://h:1", "anonymous": True, "retries": 3}
    storage = ec.StorageOptions(store=settings)
    for other in (pickle.loads(pickle.dumps(storage)), copy.deepcopy(storage), ec.StorageOptions(store=dict(settings))):
        assert (other, hash(other)) == (storage, hash(storage))
    assert BucketSettings.of(settings.query(), "x") == settings
    with pytest.raises(AttributeError):
        settings.retries = 4  # type: ignore[misc]
    with pytest.raises(TypeError):
        storage.store["retries"] = 4  # type: ignore[index]


def test_a_path_is_left_alone(tmp_path: pathlib.Path) -> None:
    """A question mark is a character of a file's name; settings of buckets say nothing of folders."""
    folder = tmp_path / "a?b=1"
    save(str(folder), 1, storage=ec.StorageOptions(store={"endpoint": "http://127.0.0.1:1"}))
    assert (folder / "1" / "epoch.json").exists()
    assert with_settings(folder, {"retries": 1}) is folder
    assert (
        with_settings("memory://a?retries=2", {"retries": 1, "concurrency": 4}) == "memory://a?retries=2&concurrency=4"
    )
    store, name = open_file(folder / "x.json")
    assert (store.root, name) == (str(folder), "x.json")
    store, name = open_file("memory://a/b/x.json?retries=2")
    assert (store.root, store.address, name) == ("memory://a/b", "memory://a/b?retries=2", "x.json")
    with pytest.raises(InvalidArgumentError) as caught:
        path_text(pathlib.Path(f"s3://b/run?token={SECRET}"))
    assert SECRET not in str(caught.value)
    assert plain("s3://me:pw@b/a?x=1#y") == "s3://b/a"
