from prefill_worker.worker import PrefillWorker
from tandem.worker.main import run

if __name__ == "__main__":
    run(PrefillWorker, "prefill_worker")
