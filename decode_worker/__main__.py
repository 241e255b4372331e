from decode_worker.worker import DecodeWorker
from tandem.worker.main import run

if __name__ == "__main__":
    run(DecodeWorker, "decode_worker")
