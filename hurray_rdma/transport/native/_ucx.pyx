# cython: language_level=3, boundscheck=False, wraparound=False, embedsignature=True
"""The RMA calls of UCX that ucxx lacks, on the raw handles of ucxx objects.

Memory, remote keys, and the loops that move a plan: arrays in, counts and a status out, the GIL released. No policy:
which way bytes go, and what a failure means, is decided in the Python modules beside this one. Import it only after
``libucx.load_library()``; `hurray_rdma.transport.binding` does both.
"""
cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdio cimport FILE, fclose
from libc.stdlib cimport free
from libc.string cimport memset, strerror

from moves cimport (
    HURRAY_DESCRIPTION_SIZE, HURRAY_GET, HURRAY_PUT, hurray_close_begin, hurray_close_drop, hurray_close_wait,
    hurray_closing_t, hurray_copy, hurray_copy_rows, hurray_flush, hurray_map_over, hurray_memcpy, hurray_outcome_t,
    hurray_place_t, hurray_plan_t, hurray_post, hurray_rings, hurray_rows_inside, hurray_rows_t, hurray_unmapped,
)
from ucp cimport *

cdef extern from "sys/mman.h" nogil:
    int MADV_HUGEPAGE
    int madvise(void *address, size_t length, int advice)

cdef extern from "stdio.h" nogil:
    FILE *open_memstream(char **buffer, size_t *size)

HOST = <int>UCS_MEMORY_TYPE_HOST
CUDA = <int>UCS_MEMORY_TYPE_CUDA
CUDA_MANAGED = <int>UCS_MEMORY_TYPE_CUDA_MANAGED
UNKNOWN = <int>UCS_MEMORY_TYPE_UNKNOWN


class UcxError(Exception):
    """A UCX call failed: ``status`` is its ``ucs_status_t``, ``call`` its name."""

    def __init__(self, str call, int status):
        self.call = call
        self.status = status
        super().__init__(f"{call}: {status_text(status)}")


def status_text(int status):
    """UCX's own words for a ``ucs_status_t``."""
    return ucs_status_string(<ucs_status_t>status).decode()


cdef enum:
    REPLACED_AT_ONCE = 64 << 20


cdef int check(str call, ucs_status_t status) except -1:
    if status != UCS_OK:
        raise UcxError(call, <int>status)
    return 0


def first_outside(const uint64_t[::1] offsets not None, const uint64_t[::1] lengths not None, uint64_t nbytes):
    """Which piece is the first that does not lie in a region of ``nbytes``; -1 if all do. uint64 ``[count]`` both."""
    cdef Py_ssize_t at, first = -1
    if offsets.shape[0] != lengths.shape[0]:
        raise ValueError("offsets and lengths must have the same length")
    with nogil:
        for at in range(lengths.shape[0]):
            if lengths[at] > nbytes or offsets[at] > nbytes - lengths[at]:
                first = at
                break
    return first


cdef class StopFlag:
    """Set from any thread to end a running `post` or `copy` early; it then reports UCS_ERR_CANCELED."""
    cdef int value

    def set(self):
        self.value = 1

    def is_set(self):
        return self.value != 0

    @property
    def address(self):
        """Where native loops of other modules look; they keep the flag alive meanwhile."""
        return <uintptr_t>&self.value


@cython.no_gc_clear  # the garbage collector must not take the owners away before __dealloc__
cdef class Memory:
    """One ``ucp_mem_h``: given memory (`map`) or memory that UCX allocates (`allocate`).

    Host memory is offered through the buffer protocol, writable. `close` unmaps at once, or as soon as the last buffer
    that was handed out is gone: a view never dangles.
    """
    cdef ucp_context_h context
    cdef ucp_mem_h handle
    cdef object owners
    cdef readonly uintptr_t address
    cdef readonly size_t nbytes
    cdef readonly int memory_type
    cdef Py_ssize_t exports
    cdef bint closing

    @staticmethod
    def map(uintptr_t context, uintptr_t address, size_t nbytes, int memory_type, owners):
        """``ucp_mem_map`` of memory that exists; ``owners`` (kept until unmapped) are the ucxx
        context and whoever owns the memory. With the type `UNKNOWN` UCX finds it out."""
        return _map(context, address, nbytes, memory_type, 0, owners)

    @staticmethod
    def allocate(uintptr_t context, size_t nbytes, int memory_type, owners):
        """``ucp_mem_map`` with ``UCP_MEM_MAP_ALLOCATE``: UCX picks memory that a process on this host can map."""
        return _map(context, 0, nbytes, memory_type, UCP_MEM_MAP_ALLOCATE, owners)

    def pack_rkey(self):
        """The packed remote key (``ucp_rkey_pack``): whoever holds it and the address may read and write the memory."""
        cdef void *buffer
        cdef size_t size
        cdef ucs_status_t status
        if self.handle == NULL:
            raise ValueError("pack_rkey of closed memory")
        with nogil:
            status = ucp_rkey_pack(self.context, self.handle, &buffer, &size)
        check("ucp_rkey_pack", status)
        try:
            return (<char *>buffer)[:size]
        finally:
            ucp_rkey_buffer_release(buffer)

    @property
    def closed(self):
        return self.closing or self.handle == NULL

    @property
    def in_use(self):
        """Whether something puts off the unmapping that `close` asks for."""
        return self.exports > 0

    def close(self):
        """Unmaps (and frees what UCX allocated) now, or when the last view is gone. Idempotent."""
        self.closing = True
        self._unmap_if_unused()

    def hold(self):
        """Puts off the unmapping that `close` asks for until `release`: for the time that UCX reads or writes here."""
        if self.handle == NULL or self.closing:
            raise ValueError("hold of closed memory")
        self.exports += 1

    def release(self):
        """Ends one `hold`."""
        self.exports -= 1
        self._unmap_if_unused()

    def take_over(self, Memory old not None, uintptr_t seen_address):
        """Copies the content of ``old`` and appears in its place, at ``seen_address``: whoever looks there sees this
        memory from now on, while a peer that mapped ``old`` keeps the former pages. For allocated host memory; nobody
        may write there meanwhile."""
        cdef uint64_t zero = 0, nbytes = self.nbytes
        cdef int error
        if old.nbytes != self.nbytes or old.handle == NULL or self.memory_type != UCS_MEMORY_TYPE_HOST:
            raise ValueError("only host memory can be replaced in place, by as much")
        with nogil:
            hurray_memcpy(old.address, self.address, &zero, &zero, &nbytes, 1)
            error = hurray_map_over(self.address, seen_address, self.nbytes)
        if error:
            raise OSError(error, "mremap: " + strerror(error).decode())

    def replace(self, uintptr_t start, size_t skip, size_t nbytes):
        """Takes the content of as many whole pages of this process, and appears in their place: whoever looks there sees
        this memory from now on. Of it, the ``nbytes`` from ``skip`` on count. For shared memory that was just allocated;
        nobody may write there meanwhile. After an error all content is where it was, some of it in this memory."""
        cdef uint64_t zero = 0, done = 0, part, whole = self.nbytes
        cdef int error = 0
        if self.handle == NULL or self.memory_type != UCS_MEMORY_TYPE_HOST or skip + nbytes > whole:
            raise ValueError("only host memory can replace other memory, and only as much as it has")
        with nogil:
            while done < whole and not error:  # in parts: the memory that is replaced is freed as it goes
                part = min(whole - done, <uint64_t>REPLACED_AT_ONCE)
                hurray_memcpy(start + done, self.address + done, &zero, &zero, &part, 1)
                error = hurray_map_over(self.address + done, start + done, part)
                done += part
        if error:
            raise OSError(error, "mremap: " + strerror(error).decode())
        self.address += skip
        self.nbytes = nbytes

    cdef _unmap_if_unused(self):
        cdef ucs_status_t status
        cdef ucp_mem_h handle
        if not self.closing or self.exports > 0 or self.handle == NULL:
            return
        handle, self.handle = self.handle, NULL
        with nogil:
            status = ucp_mem_unmap(self.context, handle)
        self.owners = None
        check("ucp_mem_unmap", status)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        if self.handle == NULL or self.closing:
            raise BufferError("buffer of closed memory")
        if self.memory_type != UCS_MEMORY_TYPE_HOST:
            raise BufferError("only host memory has a buffer")
        PyBuffer_FillInfo(buffer, self, <void *>self.address, <Py_ssize_t>self.nbytes, 0, flags)
        self.exports += 1

    def __releasebuffer__(self, Py_buffer *buffer):
        self.exports -= 1
        self._unmap_if_unused()

    def __dealloc__(self):
        if self.handle != NULL:
            ucp_mem_unmap(self.context, self.handle)


cdef Memory _map(uintptr_t context, uintptr_t address, size_t nbytes, int memory_type, unsigned flags, owners):
    cdef ucp_mem_map_params_t params
    cdef ucp_mem_attr_t attr
    cdef Memory memory = Memory()
    cdef ucs_status_t status

    memset(&params, 0, sizeof(params))
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS
    params.length = nbytes
    params.flags = flags
    if memory_type != <int>UCS_MEMORY_TYPE_UNKNOWN:
        params.field_mask |= UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE
        params.memory_type = <ucs_memory_type_t>memory_type
    if not flags & UCP_MEM_MAP_ALLOCATE:
        params.field_mask |= UCP_MEM_MAP_PARAM_FIELD_ADDRESS
        params.address = <void *>address
    memory.context = <ucp_context_h>context
    with nogil:
        status = ucp_mem_map(memory.context, &params, &memory.handle)
    if status != UCS_OK:
        memory.handle = NULL
    check("ucp_mem_map", status)
    memory.owners = owners

    attr.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS | UCP_MEM_ATTR_FIELD_LENGTH | UCP_MEM_ATTR_FIELD_MEM_TYPE
    check("ucp_mem_query", ucp_mem_query(memory.handle, &attr))
    # UCX may round both ends outward to pages; the caller's span is what counts.
    memory.address = <uintptr_t>attr.address if flags & UCP_MEM_MAP_ALLOCATE else address
    if flags & UCP_MEM_MAP_ALLOCATE and attr.mem_type == UCS_MEMORY_TYPE_HOST:
        # Before anybody touches it; a kernel that knows or allows no huge pages here says so, and nothing is lost.
        madvise(<void *>attr.address, nbytes, MADV_HUGEPAGE)
    memory.nbytes = nbytes
    memory.memory_type = <int>attr.mem_type
    return memory


cdef void on_endpoint_error(void *arg, ucp_ep_h ep, ucs_status_t status) noexcept nogil:
    # What fails is told by the operations themselves; UCX wants a handler for its error handling mode.
    pass


@cython.no_gc_clear
cdef class Endpoint:
    """One ``ucp_ep_h`` to the worker with the given address.

    Not ucxx's endpoint: that one gives a failed endpoint up without closing it, and when UCX lets go of memory is what
    matters here. Close its remote keys first, and let no other call run when it closes.
    """
    cdef ucp_worker_h worker
    cdef ucp_ep_h handle_
    cdef hurray_closing_t *closing
    cdef bint error_handling
    cdef object owner

    def __init__(self, uintptr_t worker, const unsigned char[::1] address not None, bint error_handling, owner):
        cdef ucp_ep_params_t params
        memset(&params, 0, sizeof(params))
        params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
        params.address = <const ucp_address_t *>&address[0]
        params.err_mode = UCP_ERR_HANDLING_MODE_PEER if error_handling else UCP_ERR_HANDLING_MODE_NONE
        if error_handling:
            params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER
            params.err_handler.cb = on_endpoint_error
        self.worker = <ucp_worker_h>worker
        self.error_handling = error_handling
        check("ucp_ep_create", ucp_ep_create(self.worker, &params, &self.handle_))
        self.owner = owner

    def __dealloc__(self):
        # Not closed by its user: the worker closes it; nothing here may block.
        if self.closing != NULL:
            hurray_close_drop(self.closing)

    @property
    def handle(self):
        """``ucp_ep_h``, 0 once `close` has been called."""
        return <uintptr_t>self.handle_ if self.closing == NULL else 0

    def close(self, uint64_t deadline_ns):
        """Closes; True once UCX has let go of the endpoint and of all memory in flight on it. Repeat it after False.

        With error handling by force: what is in flight is cancelled. Without it UCX can only wait for the peer.
        """
        cdef ucs_status_t status
        if self.handle_ == NULL:
            return True
        with nogil:
            if self.closing == NULL:
                self.closing = hurray_close_begin(self.handle_, self.error_handling)
            if self.closing == NULL:
                status = UCS_ERR_NO_MEMORY
            else:
                status = hurray_close_wait(self.worker, self.closing, deadline_ns)
        if self.closing == NULL:
            raise MemoryError("ucp_ep_close_nbx")
        if status != UCS_OK:
            return False
        hurray_close_drop(self.closing)
        self.closing = NULL
        self.handle_ = NULL
        self.owner = None
        return True

    def info(self):
        """What ``ucp_ep_print_info`` prints: the endpoint's lanes, one a line."""
        cdef char *text = NULL
        cdef size_t size = 0
        cdef FILE *stream
        if self.handle == 0:
            raise ValueError("info of a closed endpoint")
        stream = open_memstream(&text, &size)
        if stream == NULL:
            raise MemoryError("open_memstream")
        try:
            ucp_ep_print_info(self.handle_, stream)
            fclose(stream)
            return text[:size].decode(errors="replace")
        finally:
            free(text)


def context_info(uintptr_t context):
    """What ``ucp_context_print_info`` prints: memory domains and transports, one a line."""
    cdef char *text = NULL
    cdef size_t size = 0
    cdef FILE *stream = open_memstream(&text, &size)
    if stream == NULL:
        raise MemoryError("open_memstream")
    try:
        ucp_context_print_info(<ucp_context_h>context, stream)
        fclose(stream)
        return text[:size].decode(errors="replace")
    finally:
        free(text)


def memory_types(uintptr_t context):
    """The memory types that the context can move (``ucp_context_query``): `HOST`, `CUDA`, `CUDA_MANAGED` and others."""
    cdef ucp_context_attr_t attr
    attr.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES
    check("ucp_context_query", ucp_context_query(<ucp_context_h>context, &attr))
    return frozenset(bit for bit in range(64) if attr.memory_types >> bit & 1)


def drain(uintptr_t worker):
    """``ucp_worker_progress`` until nothing is left to do, or for as often as empties any queue of one peer: what had
    reached this process before is where it belongs then."""
    cdef int rounds
    with nogil:
        for rounds in range(100000):
            if ucp_worker_progress(<ucp_worker_h>worker) == 0:
                break


@cython.no_gc_clear
cdef class RemoteKey:
    """One ``ucp_rkey_h``, unpacked for one endpoint; destroy it (`close`) when no operation with it is in flight."""
    cdef ucp_rkey_h handle
    cdef object owner

    def __init__(self, Endpoint endpoint not None, const unsigned char[::1] packed not None):
        cdef ucs_status_t status
        if endpoint.handle == 0:
            raise ValueError("remote key for a closed endpoint")
        with nogil:  # CUDA may take its time to map what the key is of
            status = ucp_ep_rkey_unpack(endpoint.handle_, &packed[0], &self.handle)
        if status != UCS_OK:
            self.handle = NULL
        check("ucp_ep_rkey_unpack", status)
        self.owner = (endpoint, endpoint.owner)  # the worker, whose memory the key is of, must outlive it

    def pointer(self, uint64_t remote_address):
        """This process's own address for ``remote_address`` (``ucp_rkey_ptr``), None where the memory is not shared. Of
        the address UCX checks nothing."""
        cdef void *address = NULL
        if self.handle == NULL:
            raise ValueError("pointer of a closed remote key")
        if ucp_rkey_ptr(self.handle, remote_address, &address) != UCS_OK:
            return None
        return <uintptr_t>address

    def close(self):
        """Destroys the key. Idempotent. No `post` with it may be running."""
        if self.handle != NULL:
            ucp_rkey_destroy(self.handle)
            self.handle = NULL
            self.owner = None

    def __dealloc__(self):
        if self.handle != NULL:
            ucp_rkey_destroy(self.handle)


cdef tuple _as_tuple(hurray_outcome_t outcome):
    return outcome.posted, outcome.completed, outcome.nbytes, <int>outcome.status, outcome.settled != 0


cdef int same_length(const uint64_t[::1] a, const uint64_t[::1] b, const uint64_t[::1] c) except -1:
    if a.shape[0] != b.shape[0] or a.shape[0] != c.shape[0]:
        raise ValueError(f"plan arrays of unlike lengths: {a.shape[0]}, {b.shape[0]}, {c.shape[0]}")
    return 0


def post(uintptr_t worker, uintptr_t endpoint, bint get, uint64_t local_base, Memory local_memory not None,
         uint64_t remote_base, RemoteKey remote_key not None, const uint64_t[::1] local_offsets not None,
         const uint64_t[::1] remote_offsets not None, const uint64_t[::1] lengths not None, uint64_t window,
         StopFlag stop not None, uint64_t deadline_ns, bint describe):
    """Posts a plan as ``ucp_put_nbx`` (or ``ucp_get_nbx``) and flushes; see ``hurray_post`` in moves.h.

    Returns ``(posted, completed, nbytes, status, settled, description)``. While completed < posted UCX still uses the
    local memory: keep it alive and untouched until the endpoint has been closed by force. The description is empty
    unless ``describe``, and where UCX did the first piece at once.
    """
    cdef char description[HURRAY_DESCRIPTION_SIZE]
    cdef hurray_plan_t plan
    cdef hurray_outcome_t outcome
    same_length(local_offsets, remote_offsets, lengths)
    if local_memory.handle == NULL or remote_key.handle == NULL:
        raise ValueError("post on closed memory or a closed remote key")
    if lengths.shape[0] == 0:
        return 0, 0, 0, <int>UCS_OK, True, ""
    description[0] = 0
    plan.local_offsets = &local_offsets[0]
    plan.remote_offsets = &remote_offsets[0]
    plan.lengths = &lengths[0]
    plan.count = lengths.shape[0]
    with nogil:
        outcome = hurray_post(<ucp_worker_h>worker, <ucp_ep_h>endpoint, HURRAY_GET if get else HURRAY_PUT, local_base,
                              local_memory.handle, remote_base, remote_key.handle, plan, window, &stop.value,
                              deadline_ns, description if describe else NULL)
    return *_as_tuple(outcome), description.decode(errors="replace")


def flush(uintptr_t worker, uintptr_t endpoint, StopFlag stop not None, uint64_t deadline_ns):
    """``ucp_ep_flush_nbx``, waited for; returns the status."""
    cdef ucs_status_t status
    with nogil:
        status = hurray_flush(<ucp_worker_h>worker, <ucp_ep_h>endpoint, &stop.value, deadline_ns)
    return <int>status


def copy(uint64_t src_base, uint64_t dst_base, const uint64_t[::1] src_offsets not None,
         const uint64_t[::1] dst_offsets not None, const uint64_t[::1] lengths not None, StopFlag stop not None,
         uint64_t deadline_ns):
    """Copies a plan inside this process's address space with non-temporal stores; see ``hurray_copy`` in moves.h.

    Returns ``(posted, completed, nbytes, status, settled)``; both memories are free again when it returns.
    """
    cdef hurray_outcome_t outcome
    cdef const uint64_t *src
    cdef const uint64_t *dst
    cdef const uint64_t *nbytes
    same_length(src_offsets, dst_offsets, lengths)
    if lengths.shape[0] == 0:
        return 0, 0, 0, <int>UCS_OK, True
    src, dst, nbytes = &src_offsets[0], &dst_offsets[0], &lengths[0]
    with nogil:
        outcome = hurray_copy(src_base, dst_base, src, dst, nbytes, <uint64_t>lengths.shape[0], &stop.value,
                              deadline_ns)
    return _as_tuple(outcome)


def copy_rows(uint64_t src_base, uint64_t src_nbytes, uint64_t dst_base, uint64_t dst_nbytes,
              const uint64_t[:, ::1] places not None, const uint32_t[::1] src_rows not None,
              const uint32_t[::1] dst_rows not None, StopFlag stop not None, uint64_t deadline_ns, uint64_t bell,
              uint64_t token):
    """Copies rows of strided memory; see ``hurray_copy_rows`` in moves.h. ``places`` is uint64 ``[num_places, 5]``,
    ``bell`` an address, or 0.

    Returns what `copy` does. IndexError: a row lies outside; nothing was copied.
    """
    cdef hurray_outcome_t outcome
    cdef hurray_rows_t rows
    cdef bint inside
    if dst_rows.shape[0] != src_rows.shape[0] or places.shape[1] != 5:
        raise ValueError("src_rows and dst_rows must have the same length, and places five columns")
    rows.num_places, rows.num_rows = <uint64_t>places.shape[0], <uint64_t>src_rows.shape[0]
    if rows.num_places == 0 or rows.num_rows == 0:
        rows.num_places = rows.num_rows = 0  # of neither, since an empty array has no first element to point at
    else:
        rows.places = <const hurray_place_t *>&places[0, 0]
        rows.src_rows, rows.dst_rows = &src_rows[0], &dst_rows[0]
    with nogil:
        inside = hurray_rows_inside(rows, src_nbytes, dst_nbytes)
        if inside:
            outcome = hurray_copy_rows(src_base, dst_base, rows, &stop.value, deadline_ns, <uint64_t *>bell, token)
    if not inside:
        raise IndexError(f"a row lies outside memory of {src_nbytes} and {dst_nbytes} bytes")
    return _as_tuple(outcome)


def rings(const uint64_t[::1] words not None, Py_ssize_t index, uint64_t token, uint64_t timeout_ns):
    """Whether ``words[index]`` holds the token within that time; see ``hurray_rings`` in moves.h."""
    cdef const uint64_t *bell = &words[index]
    cdef int heard
    with nogil:
        heard = hurray_rings(bell, token, timeout_ns)
    return heard != 0


def is_unmapped(uint64_t start, uint64_t nbytes):
    """Whether this process has nothing mapped at any of the bytes; see ``hurray_unmapped`` in moves.h."""
    return hurray_unmapped(start, nbytes) != 0


def memcpy(uint64_t src_base, uint64_t dst_base, const uint64_t[::1] src_offsets not None,
           const uint64_t[::1] dst_offsets not None, const uint64_t[::1] lengths not None):
    """A plain C memcpy of every piece: the yardstick of reports."""
    same_length(src_offsets, dst_offsets, lengths)
    if lengths.shape[0] == 0:
        return
    with nogil:
        hurray_memcpy(src_base, dst_base, &src_offsets[0], &dst_offsets[0], &lengths[0], <uint64_t>lengths.shape[0])
