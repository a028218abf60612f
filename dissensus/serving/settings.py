"""How a server is to run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """How a server is to run.

    Attributes:
        path: The exported file.
        name: What the model is called in addresses.
        host: Address to listen on.
        port: Port to listen on.
        workers: Processes that answer, each with the file in memory; one that dies is started again.
        threads: Processor threads of one run; 0 for as many as there are processors.
        api_key: What requests must bring along as `Authorization: Bearer KEY`; None lets all in. Health and the page stay open.
        certificate: File of the TLS certificate; None for plain HTTP.
        key: File of its private key.
        queue_rows: Rows that may wait; further requests get 429.
        most_rows: Rows that one request may have.
        most_bytes: Bytes that one request may have.
        seconds: How long a request may take to arrive.
        drift_threshold: Where the drift alarm rings: inputs that do not change ring it with a probability of one in so many.
    """

    path: str
    name: str = "model"
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    threads: int = 1
    api_key: str | None = None
    certificate: str | None = None
    key: str | None = None
    queue_rows: int = 1024
    most_rows: int = 4096
    most_bytes: int = 8 << 20
    seconds: float = 10.0
    drift_threshold: float = 100.0
