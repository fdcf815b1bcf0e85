//! Bad days: what the engine does with a pool that was damaged, with a disk that is full, and with one that loses what it
//! was given. Each ends with an error that says what to do, or with everything as it was promised.
//!
//! | file | says |
//! |---|---|
//! | `damage` | index and `pool.json` missing, torn, too new; stray files; missing layers; rebuilding |
//! | `full` | no room in the middle of anything |
//! | `lost` | a write-back that failed |
//! | `odd` | names that cannot be opened, read or moved; records damaged while their volumes are in use |
//! | `read_only` | a pool whose filesystem takes no more changes |

mod common;

#[path = "bad_days/damage.rs"]
mod damage;
#[path = "bad_days/full.rs"]
mod full;
#[path = "bad_days/lost.rs"]
mod lost;
#[path = "bad_days/odd.rs"]
mod odd;
#[path = "bad_days/read_only.rs"]
mod read_only;
