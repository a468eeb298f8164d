"""The schemes of buckets (`gs://`, `s3://`, …): one table with a row for each. To add a scheme, add a row.

A row has the client's constructor, the settings and the environment variables of the scheme, the error codes that
obstore does not translate, and the abilities of other programs. No other module tests the name of a scheme.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from epochckpt.errors import AccessError, InvalidArgumentError
from epochckpt.options import BucketSettings

_GOOGLE_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_TOKEN_SECS = 15  # of a server of credentials
_FOREIGN = re.compile(r"unknown variant `(\w+)`")  # of Google's files of credentials
_SERVER = re.compile(r"https?://[^/@?#\s]+(?:/[^@?#\s]*)?")
_NEVER = re.compile(r"(?!)")


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a client is made of.

    Attributes:
        bucket: name of the bucket.
        account: name of the bucket's account. Empty if buckets have no account.
        settings: the settings of the bucket.
        endpoint: URL of the server. Empty for the cloud's own.
        environment: the environment variables that change a client of this scheme.
        client_options: time limits and the like, as obstore names them.
        retry_config: how often the client repeats a request by itself, as obstore names it.
    """

    bucket: str
    account: str
    settings: BucketSettings
    endpoint: str
    environment: Mapping[str, str]
    client_options: Mapping[str, Any]
    retry_config: Mapping[str, Any]

    def made(
        self,
        store: Callable[..., Any],
        config: Mapping[str, Any],
        *,
        endpoint: str | None = None,
        headers: Mapping[str, str] | None = None,
        credential_provider: Any = None,
    ) -> Any:
        """An object of obstore's class `store`, with the values of `config` that are not empty.

        `endpoint` takes the place of the endpoint of this object.
        """
        server = self.endpoint if endpoint is None else endpoint
        given: dict[str, Any] = {"config": {name: value for name, value in config.items() if value}}
        given["client_options"] = {
            **self.client_options,
            "allow_http": server.startswith("http://"),
            "default_headers": dict(headers or {}),
        }
        given["retry_config"] = dict(self.retry_config)
        if credential_provider is not None:
            given["credential_provider"] = credential_provider
        return store(self.bucket, **given)


@dataclass(frozen=True, kw_only=True)
class TensorStoreDriver:
    """How TensorStore reaches a bucket of this kind.

    Attributes:
        name: of the driver.
        server: that it asks.
        server_variable: the variable of the environment that names another server.
    """

    name: str
    server: str
    server_variable: str


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One row of the table.

    Attributes:
        name: the text before `://`.
        about: what buckets of the scheme are, for docs/.
        example: a URL, for errors and docs/.
        client: makes a client and returns it with its endpoint. None if the scheme has no server.
        settings: the settings of server and identity that the scheme takes. Every scheme takes the other settings.
        payer: the type of `requester_pays`: `bool`, or `str` for the name of a project.
        server_variables: environment variables that name a server. The first one that is set counts.
        bare_servers: these variables may leave `http://` out.
        variables: prefixes of the names of all environment variables that change a client.
        account_variable: environment variable that names the account of a bucket. Empty if buckets have no account.
        account_server: URL of an account's server, with `{account}` in it.
        exists: matches an answer with status 409 that means "this object exists". Any other 409 means "try again".
        no_bucket: matches an answer that means "this bucket does not exist".
        policy: matches an answer by which a retention policy, a hold or a lock protects an object.
        generations: an object's generation names a version of it in conditions. Otherwise its ETag does.
        copies_if_absent: the server can copy an object on the condition that the target does not exist.
        stock_orbax: stock Orbax can read and write such a bucket.
        orbax_name: the scheme's name in Orbax's events.
        tensorstore: the driver of TensorStore. None if TensorStore has no driver.
    """

    name: str
    about: str
    example: str
    client: Callable[[Opening], tuple[Any, str]] | None = None
    settings: frozenset[str] = frozenset()
    payer: type[bool] | type[str] = bool
    server_variables: tuple[str, ...] = ()
    bare_servers: bool = False
    variables: tuple[str, ...] = ()
    account_variable: str = ""
    account_server: str = ""
    exists: re.Pattern[str] = _NEVER
    no_bucket: re.Pattern[str] = _NEVER
    policy: re.Pattern[str] = _NEVER
    generations: bool = False
    copies_if_absent: bool = True
    stock_orbax: bool = False
    orbax_name: str = "other"
    tensorstore: TensorStoreDriver | None = None

    def environment(self) -> tuple[tuple[str, str], ...]:
        """The variables of the environment that change a client."""
        return tuple(sorted(item for item in os.environ.items() if item[0].startswith(self.variables)))

    def server(self, settings: BucketSettings) -> str:
        """The server that the settings, the environment or the account name; empty for the cloud's own.

        InvalidArgumentError: a variable of the environment names no server, or there is no account.
        """
        account = self.account(settings)
        if self.account_variable and not account:
            raise InvalidArgumentError(
                f"{self.name}:// needs the name of the storage account: set {self.account_variable}, or ?account=<name>"
            )
        if settings.endpoint:
            return settings.endpoint
        name = next((name for name in self.server_variables if os.environ.get(name)), "")
        if not name:
            return self.account_server.format(account=account)
        address = os.environ[name]
        if self.bare_servers and "://" not in address:
            address = f"http://{address}"
        if not _SERVER.fullmatch(address):
            raise InvalidArgumentError(f"{name} is no URL of a server: expected http://host:port or https://host:port")
        return address.rstrip("/")

    def account(self, settings: BucketSettings) -> str:
        """The account that buckets of this kind belong to; empty if there is none."""
        return (settings.account or os.environ.get(self.account_variable, "")) if self.account_variable else ""

    def check(self, settings: BucketSettings, where: str) -> None:
        """Refuses settings that say nothing of such a bucket, with InvalidArgumentError."""
        others = frozenset[str]().union(*(row.settings for row in SCHEMES.values())) - self.settings
        if wrong := [name for name in settings if name in others]:
            raise InvalidArgumentError(f"{where}: {wrong[0]} is no setting of {self.name}://")
        payer = settings.requester_pays
        if payer and not isinstance(payer, self.payer):
            expected = "true or false" if self.payer is bool else "the project that pays"
            raise InvalidArgumentError(f"{where}: requester_pays is wrong; expected {expected}")


def _google(opening: Opening) -> tuple[Any, str]:
    from obstore.store import GCSStore

    settings = opening.settings
    endpoint = opening.endpoint
    config = {"base_url": endpoint, "skip_signature": settings.anonymous}
    if settings.anonymous or (endpoint and not settings.endpoint):  # an emulator knows no accounts
        config["google_bearer_token"] = "none"  # writes send it in any case
    headers = {"x-goog-user-project": str(settings.requester_pays)} if settings.requester_pays else {}
    try:
        return opening.made(GCSStore, config, headers=headers), endpoint
    except Exception as error:
        if (kind := _FOREIGN.search(str(error))) is None:
            raise
        provider = _google_auth(kind[1])
        return opening.made(GCSStore, config, headers=headers, credential_provider=provider), endpoint


def _google_auth(kind: str) -> Any:
    """Credentials of a kind that google-auth knows and the client does not, such as another cloud's account."""
    try:
        auth = importlib.import_module("google.auth")
        transport = importlib.import_module("google.auth.transport.requests")
        from obstore.auth.google import GoogleCredentialProvider

        ask: Any = functools.partial(transport.Request(), timeout=_TOKEN_SECS)
        return GoogleCredentialProvider(auth.default(scopes=[_GOOGLE_SCOPE], request=ask)[0], request=ask)
    except ImportError as error:
        raise InvalidArgumentError(
            f"Google's credentials are of the kind {kind!r}, which needs google-auth: pip install google-auth requests"
            "; without it the kinds 'service_account' and 'authorized_user', and the account of the machine, work"
        ) from error


def _s3(opening: Opening) -> tuple[Any, str]:
    from obstore.store import S3Store

    settings = opening.settings
    endpoint = opening.endpoint
    provider = None
    profile = settings.profile or (None if settings.anonymous else opening.environment.get("AWS_PROFILE"))
    if profile:
        provider, address = _profile(profile)
        endpoint = endpoint or address
    virtual = settings.addressing == "virtual"
    server = _with_bucket(endpoint, opening.bucket) if virtual else endpoint
    config = {"conditional_put": "etag", "endpoint": server, "region": settings.region}
    config |= {"request_payer": settings.requester_pays, "skip_signature": settings.anonymous}
    config |= {"virtual_hosted_style_request": virtual}
    return opening.made(S3Store, config, endpoint=server, credential_provider=provider), endpoint


def _with_bucket(endpoint: str, bucket: str) -> str:
    """The URL of a server with the bucket as the first label of its host; the cloud's own, "", as it is."""
    scheme, separator, place = endpoint.partition("://")
    return f"{scheme}://{bucket}.{place}" if separator else endpoint


def _profile(name: str) -> tuple[Any, str]:
    """The credentials of a profile of `~/.aws`, with its region, and its endpoint, if it has one."""
    try:
        import boto3.session
        import botocore.session
        from botocore.configprovider import ConfiguredEndpointProvider
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise InvalidArgumentError("a profile of ~/.aws is asked for, which needs boto3: pip install boto3") from error

    files = botocore.session.Session(profile=name)
    address = ConfiguredEndpointProvider(files.full_config, files.get_scoped_config(), "s3").provide()
    if files.get_credentials() is None:
        raise AccessError(f"the profile {name!r} in ~/.aws has no credentials")
    return Boto3CredentialProvider(boto3.session.Session(botocore_session=files)), (address or "").rstrip("/")


def _azure(opening: Opening) -> tuple[Any, str]:
    from obstore.store import AzureStore

    config = {"account_name": opening.account, "endpoint": opening.endpoint}
    config |= {"skip_signature": opening.settings.anonymous}
    return opening.made(AzureStore, config), opening.endpoint


SCHEMES = {
    row.name: row
    for row in (
        Scheme(
            name="gs",
            about="Google Cloud Storage",
            generations=True,
            example="gs://bucket/run",
            client=_google,
            settings=frozenset({"endpoint", "requester_pays", "anonymous"}),
            payer=str,
            server_variables=("STORAGE_EMULATOR_HOST",),
            bare_servers=True,
            variables=("GOOGLE_", "SSL_CERT_"),
            no_bucket=re.compile("NoSuchBucket"),
            policy=re.compile("retention ?policy|ActiveHold|under active|ObjectRetention", re.IGNORECASE),
            stock_orbax=True,
            orbax_name="gcs",
            tensorstore=TensorStoreDriver(
                name="gcs", server="https://storage.googleapis.com", server_variable="TENSORSTORE_GCS_HTTP_URL"
            ),
        ),
        Scheme(
            name="s3",
            about="S3, and stores that speak it",
            example="s3://bucket/run",
            client=_s3,
            settings=frozenset({"endpoint", "region", "profile", "addressing", "requester_pays", "anonymous"}),
            server_variables=("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
            variables=("AWS_", "SSL_CERT_"),
            no_bucket=re.compile("NoSuchBucket"),
            policy=re.compile("object lock|WORM|bucket lock|ObjectLocked|retention", re.IGNORECASE),
            copies_if_absent=False,
        ),
        Scheme(
            name="az",
            about="Azure Blob Storage",
            example="az://container/run",
            client=_azure,
            settings=frozenset({"endpoint", "account", "anonymous"}),
            server_variables=("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
            variables=("AZURE_", "IDENTITY_", "MSI_", "SSL_CERT_"),
            account_variable="AZURE_STORAGE_ACCOUNT_NAME",
            account_server="https://{account}.blob.core.windows.net",
            exists=re.compile("BlobAlreadyExists"),
            no_bucket=re.compile("ContainerNotFound|container does not exist"),
            policy=re.compile("immutable ?due ?to|ImmutabilityPolic|legal ?hold", re.IGNORECASE),
        ),
        Scheme(name="memory", about="this process's memory, for tests", example="memory://name"),
    )
}
"""Every scheme of a bucket, by its name."""

_FILES = Scheme(name="file", about="file systems", example="file:///path", stock_orbax=True)
EXAMPLES = ", ".join(row.example for row in SCHEMES.values()) + f" or {_FILES.example}"
"""URLs that name a store, for errors."""


def of(root: str) -> Scheme:
    """The row of a store's root: of a URL that of its scheme, of a path that of file systems."""
    return SCHEMES.get(root.partition("://")[0], _FILES) if "://" in root else _FILES
