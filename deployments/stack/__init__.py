"""The local stack: an S3 server, a Ray head, a Prefect server and its worker, on this machine, kept by supervisord."""
