"""Baseline for `bitgraft serve`: LitServe with the same exported model and dynamic batching.

python -m benchmarks.lit_server task.onnx THREADS
"""

import socket
import sys

import litserve
from fastapi import Request

from benchmarks.bare_server import Model


class Api(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.model = Model(sys.argv[1], int(sys.argv[2]))

    def decode_request(self, request: Request) -> object:
        return self.model.pixels(request["image"].file)

    def batch(self, inputs: list) -> list:
        return inputs

    def predict(self, batch: list) -> object:
        return self.model.scores(batch)

    def encode_response(self, output: object) -> dict[str, object]:
        return {"answers": [self.model.best(output)]}


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = litserve.LitServer(Api(max_batch_size=8, api_path="/v1/predict"), accelerator="cpu", devices=1)
    print(f"http://127.0.0.1:{port}/", flush=True)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="error")
