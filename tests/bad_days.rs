//! Bad days: the engine with a damaged pool, with a full disk, and with a disk that loses writes.
//! Each case ends with an error that says what to do, or with every promise kept.
//!
//! | file | content |
//! |---|---|
//! | `damage` | index and `pool.json` missing, torn, too new; stray files; missing layers; rebuilding |
//! | `full` | ENOSPC in the middle of every operation |
//! | `lost` | a failed write-back |
//! | `odd` | names that cannot be opened, read or moved; records damaged while their volumes are in use |
//! | `power_cut` | a power cut after a record was replaced |
//! | `read_only` | a pool whose filesystem became read-only |

mod common;

#[path = "bad_days/damage.rs"]
mod damage;
#[path = "bad_days/full.rs"]
mod full;
#[path = "bad_days/lost.rs"]
mod lost;
#[path = "bad_days/odd.rs"]
mod odd;
#[path = "bad_days/power_cut.rs"]
mod power_cut;
#[path = "bad_days/read_only.rs"]
mod read_only;
