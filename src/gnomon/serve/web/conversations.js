// Conversations, kept in this browser's IndexedDB. One record each: {id, title, updated, settings, messages}.

const opened = new Promise((resolve, reject) => {
  const request = indexedDB.open("gnomon", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("conversations", { keyPath: "id" });
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

async function run(mode, act) {
  const database = await opened;
  return new Promise((resolve, reject) => {
    const transaction = database.transaction("conversations", mode);
    const request = act(transaction.objectStore("conversations"));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

export const all = async () => (await run("readonly", (store) => store.getAll())).sort((a, b) => b.updated - a.updated);
export const put = (conversation) => run("readwrite", (store) => store.put(structuredClone(conversation)));
export const remove = (id) => run("readwrite", (store) => store.delete(id));

export const fresh = (settings = {}) => ({ id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: "", updated: Date.now(), settings: { ...settings }, messages: [] });
