"""The run directory: files are the truth, databases are caches.

files         whole-file replacement, appending without torn ends
records       what is kept of an episode
writer        StoreWriter, the one writer of metrics, events and rollouts, in a thread
columns       rollouts as Arrow tables and Parquet files (pyarrow is imported when it is needed)
sink          where the loop reports to, over the writer
reader        open_run: everything back as Arrow tables, whatever a crash left
rewind        drop what lies after the step that a resumed run continues from
checkpoints   complete checkpoints only: a manifest written last
lock          what a run was made with: packages, plugins, hashes, seeds
"""

from __future__ import annotations

from prl.store.checkpoints import Checkpoints
from prl.store.files import atomic_write
from prl.store.reader import RunReader, open_run
from prl.store.records import RolloutRecord
from prl.store.rewind import rewind
from prl.store.writer import StoreWriter

__all__ = ["Checkpoints", "RolloutRecord", "RunReader", "StoreWriter", "atomic_write", "open_run", "rewind"]
