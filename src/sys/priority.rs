//! The priority of a thread, for the processor and for the disk (setpriority(2), ioprio_set(2)).
//! The caller decides which work may wait.

use nix::libc;

use super::error::{Error, Result};

/// Gives the calling thread the lowest priority, for its whole life: it runs and reads when other
/// threads leave the processor and the disk idle. (Not every I/O scheduler looks at the second.)
pub fn lower_thread_priority() -> Result<()> {
    const NICE: i32 = 19;
    // ioprio_set(2): `IOPRIO_WHO_PROCESS` is one thread, and 0 is the calling one.
    const WHO: libc::c_int = 1;
    const IDLE_CLASS: libc::c_int = 3 << 13;
    // On Linux each thread has its own niceness, and 0 (`None`) is the calling one
    // (setpriority(2)).
    rustix::process::setpriority_process(None, NICE)
        .map_err(|errno| Error::new("setpriority", "", errno))?;
    // SAFETY: the system call takes three integers and touches no memory.
    #[expect(unsafe_code, reason = "there is no wrapper for it")]
    let set = unsafe { libc::syscall(libc::SYS_ioprio_set, WHO, 0, IDLE_CLASS) };
    match nix::errno::Errno::result(set) {
        Ok(_) => Ok(()),
        Err(errno) => Err(Error::new("ioprio_set", "", errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_calling_thread_is_slowed() {
        let before = rustix::process::getpriority_process(None).expect("getpriority");
        let slowed = std::thread::spawn(|| {
            lower_thread_priority().expect("it may always be lowered");
            rustix::process::getpriority_process(None).expect("getpriority")
        });
        assert_eq!(slowed.join().expect("no panic"), 19);
        let after = rustix::process::getpriority_process(None).expect("getpriority");
        assert_eq!(before, after);
    }
}
